"""Systems under test: their environments, how to start their processes, and how to run a batch on them.

Implements the line protocol of `peers/seat.py`; independent of what is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from benchmarks.harness import BrokenRun, Missing
from benchmarks.processes import Child

PEERS = Path(__file__).parent / "peers"
HOME = Path(os.environ.get("KVOLT_PEER_ENGINES") or Path.home() / ".cache" / "kvolt-peer-engines")
GGUF = HOME / "weights" / "smollm2-135m.gguf"
FOLDER = HOME / "weights" / "smollm2-135m"

KVOLT = "kvolt"
TRANSFORMERS = ("transformers-bf16", "transformers-fp32")
REFERENCE = "transformers-fp32"
"""The system whose first tokens are the reference."""

_ANSWER_S = 900.0


class Batch(msgspec.Struct, frozen=True):
    """A system's result for one batch; see `peers/seat.py`."""

    times: list[list[float]]
    tokens: list[list[int]]


class Kind(NamedTuple):
    """One way to run the model. The command is: script, model, threads, then KEY=VALUE."""

    environment: str | None
    """Virtual environment, a folder of HOME; None for the interpreter that runs the benchmark."""
    script: str
    model: Path = FOLDER
    arguments: tuple[str, ...] = ()


KINDS = {
    KVOLT: Kind(None, "on_kvolt.py"),
    "vllm-bf16": Kind("vllm", "on_vllm.py", arguments=("dtype=bfloat16",)),
    "transformers-bf16": Kind("transformers", "on_transformers.py", arguments=("dtype=bfloat16",)),
    "transformers-fp32": Kind("transformers", "on_transformers.py", arguments=("dtype=float32",)),
    "llama.cpp-q4_1": Kind("llama", "on_llama.py", GGUF),
}
DEFAULT = (
    *(KVOLT, f"{KVOLT}:quantize=int8"),
    *("vllm-bf16", "vllm-bf16:eager=0"),
    *TRANSFORMERS,
    "llama.cpp-q4_1",
)


def use_model(folder: Path) -> None:
    """Run kvolt with another checkpoint."""
    KINDS[KVOLT] = KINDS[KVOLT]._replace(model=folder)


def _environment(threads: int) -> dict[str, str]:
    """Environment of every system: number of threads, no model hub, and vLLM in one process on the same cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
    }


def is_kvolt(name: str) -> bool:
    return name.partition(":")[0] == KVOLT


class System(Child):
    """A running system. Its name is one of KINDS, optionally with arguments: `kvolt:quantize=int8,block_size=32`."""

    def __init__(self, name: str, threads: int) -> None:
        base, _, options = name.partition(":")
        if base not in KINDS:
            raise Missing(f"{name}: unknown; known are {', '.join(KINDS)}")
        kind, python = KINDS[base], Path(sys.executable)
        if kind.environment is not None:
            python = HOME / kind.environment / "bin/python"
            if not (HOME / kind.environment / "complete").exists():
                raise Missing(
                    f"{name}: not installed; run benchmarks/engine/peers/install {kind.environment}"
                )
        arguments = (*kind.arguments, *filter(None, options.split(",")))
        command = [str(python), str(PEERS / kind.script), str(kind.model), str(threads), *arguments]
        super().__init__(name, command, _environment(threads), answer_s=_ANSWER_S)
        try:
            self.about: dict[str, object] = self.receive()["ready"]
        except BrokenRun:
            self.stop()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> Batch:
        self.send({"prompts": prompts, "num_output": num_output})
        answer = msgspec.convert(self.receive(), Batch)
        lengths = {len(tokens) for tokens in answer.tokens}
        if len(answer.tokens) != len(prompts) or lengths != {num_output}:
            raise BrokenRun(f"{len(answer.tokens)} answers of {sorted(lengths)} tokens, not {num_output}")
        return answer
