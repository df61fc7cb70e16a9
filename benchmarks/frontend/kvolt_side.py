"""kvolt as the other side: its frontend, and sim workers that are given the same model and the same pace.

A sim step takes the same time whatever is in it. Without a time, the worker makes steps as fast as its
event loop turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.frontend import tiny_model
from benchmarks.frontend.system import (
    BLOCK_SIZE,
    NUM_WORKERS,
    Edge,
    Meter,
    Processes,
    clean_environ,
    free_port,
)
from benchmarks.frontend.tiny_model import EOS_TOKEN, TinyModel

NAME = "kvolt"

_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serve(
    model: TinyModel,
    step_s: float | None = None,
    name: str = NAME,
    *,
    frontend_arguments: Sequence[str] = (),
    profile_path: Path | None = None,
    **environ: str,
) -> Iterator[Edge]:
    """A frontend and as many worker processes as the peer has workers.

    With a path the frontend is sampled, and writes there what it did in a window as the window ends.
    """
    with Processes("kvolt") as processes:
        env = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"),
            KVOLT_LOG_LEVEL="warning",
            PYTHONPATH=str(_ROOT),
            **environ,
        )
        port = free_port()
        module = "kvolt" if profile_path is None else "benchmarks.frontend.profiled"
        frontend = processes.start(
            "frontend",
            [sys.executable, "-m", module, "frontend", "--port", str(port), *frontend_arguments],
            env,
            stdin=subprocess.DEVNULL if profile_path is None else subprocess.PIPE,
        )
        workers = [
            processes.start(f"mock-{number}", _worker_command(model, step_s), env).pid
            for number in range(NUM_WORKERS)
        ]
        processes.wait_ready(port)
        edge = Edge(name, port, Meter([frontend.pid]), Meter(workers), step_s)
        if profile_path is not None:
            edge.window_hooks = (
                lambda: _tell(frontend, "start"),
                lambda: _tell(frontend, f"stop {profile_path}"),
            )
        yield edge


def _worker_command(model: TinyModel, step_s: float | None) -> list[str]:
    arguments = {
        "model_tokenizer": str(model.tokenizer_path),
        "eos_token": EOS_TOKEN,
        "chat_template": model.chat_template,
        "latency": json.dumps({"base_s": step_s or 0.0}),
        "block_size": str(BLOCK_SIZE),
        "kv_blocks": "1048576",
        "max_num_seqs": "1024",
        "max_batch_tokens": "65536",
    }
    given = [part for name, value in arguments.items() for part in ("--arg", f"{name}={value}")]
    return [sys.executable, "-m", "kvolt", "worker", tiny_model.NAME, "--engine", "sim", *given]


def _tell(frontend: subprocess.Popen[bytes], command: str) -> None:
    assert frontend.stdin is not None
    frontend.stdin.write(command.encode() + b"\n")
    frontend.stdin.flush()
