"""SealedLog: which blocks of a pool have got names lately, for who copies them elsewhere. Bounded: the oldest go."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvolt.core.ids import BlockKey


class SealedRun(NamedTuple):
    """Blocks one below the other."""

    tip: BlockKey
    """The last of them."""
    first: int
    """Position of the first in its sequence."""


class SealedLog:
    """See the module."""

    def __init__(self, most_runs: int) -> None:
        self._runs: deque[SealedRun] = deque(maxlen=most_runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, tip: BlockKey, parent: BlockKey | None, first: int) -> None:
        runs = self._runs
        if parent is not None and runs and runs[-1].tip == parent:
            runs[-1] = SealedRun(tip, runs[-1].first)
        else:
            runs.append(SealedRun(tip, first))

    def pop(self) -> SealedRun:
        """The oldest."""
        return self._runs.popleft()
