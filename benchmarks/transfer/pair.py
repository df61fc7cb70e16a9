"""Two processes that move blocks from one to the other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.processes import Child, clean_environ
from benchmarks.transfer.memories import Memories
from benchmarks.transfer.side import POLL


class Side(Child):
    """One of them; it starts at once, and is ready when its first answer has been received."""

    def __init__(
        self,
        python: str,
        module: str,
        side: str,
        memories: Memories,
        core: int | None,
        environ: dict[str, str],
    ) -> None:
        numbers = [*memories.descriptors, memories.num_bytes]
        job = {"module": module, "side": side, "core": core, "memories": numbers}
        command = [python, "-m", "benchmarks.transfer.side", json.dumps(job)]
        super().__init__(f"{module} {side}", command, environ, memories.descriptors)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        self.send({"do": do, **more})
        return self.receive()

    def poll(self) -> None:
        """Make progress until the next command."""
        self.send({"do": POLL})


class Pair:
    """Both, connected to each other."""

    def __init__(self, source: Side, target: Side) -> None:
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
    """Processes with these classes of the module; `environ` is added to theirs, without settings of UCX and NIXL."""
    kept = {name: value for name, value in clean_environ().items() if not name.startswith(("UCX_", "NIXL_"))}
    # A core for each: both on one core now and then would dominate the result.
    cores = sorted(os.sched_getaffinity(0))
    places = cores[:2] if len(cores) > 1 else (None, None)
    children: list[Side] = []
    try:
        for side, core in zip(sides, places, strict=True):
            children.append(Side(python, module, side, memories, core, {**kept, **environ}))
        source, target = children
        of_source, of_target = source.receive(), target.receive()
        target.ask("meet", **of_source)
        if of_target:
            source.ask("meet", **of_target)
        yield Pair(source, target)
    finally:
        for child in reversed(children):
            child.stop()
