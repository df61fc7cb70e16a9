"""SealedLog: recently named blocks of a pool, to be copied to other tiers. Bounded: drops the oldest."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvolt.core.ids import BlockKey


class SealedRun(NamedTuple):
    """Consecutive blocks of a chain."""

    tip: BlockKey
    """Key of the last block."""
    first: int
    """Position of the first block in its sequence."""


class SealedLog:
    """See the module."""

    def __init__(self, max_runs: int) -> None:
        self._runs: deque[SealedRun] = deque(maxlen=max_runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add_run(self, tip: BlockKey, parent: BlockKey | None, first: int) -> None:
        runs = self._runs
        if parent is not None and runs and runs[-1].tip == parent:
            runs[-1] = SealedRun(tip, runs[-1].first)
        else:
            runs.append(SealedRun(tip, first))

    def pop_run(self) -> SealedRun:
        """Remove and return the oldest run."""
        return self._runs.popleft()
