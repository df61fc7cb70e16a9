"""The systems under test: where each lives, how its process is started and asked.

Knows the line protocol of `peers/seat.py` and nothing of what is measured.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

PEERS = Path(__file__).parent / "peers"
HOME = Path(os.environ.get("KVOLT_PEER_ENGINES") or Path.home() / ".cache" / "kvolt-peer-engines")
GGUF = HOME / "weights" / "smollm2-135m.gguf"
GGUF_BF16 = HOME / "weights" / "smollm2-135m-bf16.gguf"
FOLDER = HOME / "weights" / "smollm2-135m"

KVOLT = "kvolt"
TRANSFORMERS = ("transformers-bf16", "transformers-fp32")
REFERENCE = "transformers-fp32"
"""Whose first tokens the others' are held against."""

_START_S = 300.0
_ANSWER_S = 900.0
_STOP_S = 20.0


class Missing(Exception):
    """A system that is not installed, or does not start; the text says what to do."""


class Broken(Exception):
    """A system that ended or fell silent while it was measured."""


class Batch(msgspec.Struct, frozen=True):
    """What a system answers to one batch; see `peers/seat.py`."""

    times: list[list[float]]
    tokens: list[list[int]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to run the model. The command is: script, model, threads, then KEY=VALUE."""

    environment: str | None
    """A folder of HOME; None for the interpreter that runs the benchmark."""
    script: str
    model: Path = FOLDER
    arguments: tuple[str, ...] = ()

    def is_installed(self) -> bool:
        return self.environment is None or (HOME / self.environment / "complete").exists()

    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else HOME / self.environment / "bin/python"


KINDS = {
    KVOLT: Kind(None, "on_kvolt.py"),
    "vllm-bf16": Kind("vllm", "on_vllm.py", arguments=("dtype=bfloat16",)),
    "transformers-bf16": Kind("transformers", "on_transformers.py", arguments=("dtype=bfloat16",)),
    "transformers-fp32": Kind("transformers", "on_transformers.py", arguments=("dtype=float32",)),
    "llama.cpp-q4_1": Kind("llama", "on_llama.py", GGUF),
    "llama.cpp-bf16": Kind("llama", "on_llama.py", GGUF_BF16),
}
DEFAULT = (
    *(KVOLT, f"{KVOLT}:quantize=int8"),
    *("vllm-bf16", "vllm-bf16:eager=0"),
    *TRANSFORMERS,
    "llama.cpp-q4_1",
)


def use_model(folder: Path) -> None:
    """Run kvolt on another checkpoint."""
    KINDS[KVOLT] = replace(KINDS[KVOLT], model=folder)


def _environment(threads: int) -> dict[str, str]:
    """The same for all: as many threads, no hub; and vLLM's ways of running in one process on these cores."""
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


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by spaces; also by commas where what follows is a name and not an argument."""
    names: list[str] = []
    for word in text.replace(" ", ",").split(","):
        if "=" in word and ":" not in word and names:
            names[-1] += f",{word}"
        elif word:
            names.append(word)
    return tuple(names)


def is_kvolt(name: str) -> bool:
    return name.partition(":")[0] == KVOLT


class System:
    """A running system. Started by `start`, asked by `generate`, ended by `close`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], answers: IO[bytes], log: Path) -> None:
        self.name = name
        self.about: dict[str, object] = {}
        self._process = process
        self._answers = answers
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def start(cls, name: str, threads: int, logs: Path) -> System:
        """`name` is one of KINDS, and may go on with arguments: `kvolt:quantize=int8,block_size=32`."""
        base, _, given = name.partition(":")
        if base not in KINDS:
            raise Missing(f"{name}: unknown; known are {', '.join(KINDS)}")
        kind = KINDS[base]
        if not kind.is_installed():
            raise Missing(f"{name}: not installed; run benchmarks/engine/peers/install {kind.environment}")
        arguments = [*kind.arguments, *given.split(",")] if given else kind.arguments
        log = logs / f"{name.replace('/', '_')}.log"
        ours, theirs = os.pipe()
        with log.open("wb") as told:
            process = subprocess.Popen(
                [str(kind.python()), str(PEERS / kind.script), str(kind.model), str(threads), *arguments],
                stdin=subprocess.PIPE,
                stdout=told,
                stderr=told,
                pass_fds=(theirs,),
                env={**_environment(threads), "SEAT_DESCRIPTOR": str(theirs)},
            )
        os.close(theirs)
        system = cls(name, process, os.fdopen(ours, "rb"), log)
        try:
            ready = msgspec.json.decode(system._line(_START_S), type=dict[str, dict[str, object]])
        except Broken as error:
            system.close()
            raise Missing(f"{name}: does not start: {error}") from None
        system.about = ready["ready"]
        return system

    def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> Batch:
        ask = msgspec.json.encode({"prompts": prompts, "num_output": num_output})
        assert self._process.stdin is not None, "started with a pipe"
        try:
            self._process.stdin.write(ask + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Broken(self._last_words()) from None
        answer = msgspec.json.decode(self._line(_ANSWER_S), type=Batch)
        lengths = {len(tokens) for tokens in answer.tokens}
        if len(answer.tokens) != len(prompts) or lengths != {num_output}:
            raise Broken(f"{len(answer.tokens)} answers of {sorted(lengths)} tokens, not {num_output}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None, "started with a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def _line(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        if not ready:
            raise Broken(f"silent for {timeout_s:.0f} s")
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise Broken(self._last_words())
        return line

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "ended without a word"
