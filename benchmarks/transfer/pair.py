"""Two processes that move blocks from one to the other, and what they are told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from benchmarks.frontend.system import clean_environ
from benchmarks.runtime.pair import BrokenRun
from benchmarks.transfer.memories import Memories
from benchmarks.transfer.side import POLL

_ROOT = Path(__file__).resolve().parents[2]
_ANSWER_S = 120.0
_STOP_S = 10.0
_TAIL_CHARACTERS = 500


class Child:
    """One of them; starts at once, and is ready when its hello is here."""

    def __init__(
        self,
        python: str,
        module: str,
        side: str,
        memories: Memories,
        core: int | None,
        environ: dict[str, str],
    ) -> None:
        self._name = f"{module} {side}"
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_S)
        self._lines = self._socket.makefile("rb")
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        job = {
            "module": module,
            "side": side,
            "core": core,
            "socket": theirs.fileno(),
            "memories": [*memories.descriptors, memories.num_bytes],
        }
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.transfer.side", json.dumps(job)],
            cwd=_ROOT,
            env=environ,
            pass_fds=(theirs.fileno(), *memories.descriptors),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self._tell({"do": do, **more})
        return self.hear()

    def poll(self) -> None:
        """From now on, until it is asked for something else."""
        self._tell({"do": POLL})

    def hear(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            self._process.kill()  # it might spin, and take a core from those who are measured
            raise BrokenRun(f"{self._name} did not answer within {_ANSWER_S:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            raise BrokenRun(f"{self._name} ended early: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BrokenRun(f"{self._name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _tell(self, command: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(command).encode() + b"\n")
        except OSError:
            raise BrokenRun(f"{self._name} ended early: {self._tail()}") from None

    def _tail(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()[-_TAIL_CHARACTERS:] or "without a word"


class Pair:
    """Both, and they know each other."""

    def __init__(self, source: Child, target: Child) -> None:
        self.source = source
        self.target = target


@contextmanager
def open_pair(
    python: str,
    module: str,
    memories: Memories,
    sides: tuple[str, str] = ("Source", "Target"),
    **environ: str,
) -> Iterator[Pair]:
    """`sides`: classes of the module.

    `environ`: what both have in theirs beside ours; nothing of ours that would tune either system.
    """
    kept = {name: value for name, value in clean_environ().items() if not name.startswith(("UCX_", "NIXL_"))}
    # Each on a core of its own: a scheduler that puts both on one now and then would be the greater part of a figure.
    cores = sorted(os.sched_getaffinity(0))
    places = cores[:2] if len(cores) > 1 else (None, None)
    children: list[Child] = []
    try:
        for side, core in zip(sides, places, strict=True):
            children.append(Child(python, module, side, memories, core, {**kept, **environ}))
        source, target = children
        of_source, of_target = source.hear(), target.hear()
        target.ask("meet", **of_source)
        if of_target:
            source.ask("meet", **of_target)
        yield Pair(source, target)
    finally:
        for child in reversed(children):
            child.stop()
