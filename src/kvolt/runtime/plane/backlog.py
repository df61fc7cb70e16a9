"""Backlog of a stream whose reader is slow, sans-I/O.

Keeps order, but deltas of one choice are collected and merged into one delta when they are sent, so each token
costs a list entry and not a copy of all tokens before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvolt.core.delta import Delta, merge_deltas


class _DeltaRun(list[Delta]):
    """Consecutive deltas of one choice, merged when sent."""


class Backlog:
    __slots__ = ("_entries", "_open_runs")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        self._open_runs: dict[int, _DeltaRun] = {}
        """By choice: the run that still accepts deltas; a non-delta item closes all runs."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: Any) -> bool:
        """Append an item; True if it joined a queued delta of its choice."""
        if type(item) is not Delta:
            self._open_runs.clear()
            self._entries.append(item)
            return False
        run = self._open_runs.get(item.index)
        if run is not None and run[-1].finish is None:
            run.append(item)
            return True
        run = self._open_runs[item.index] = _DeltaRun((item,))
        self._entries.append(run)
        return False

    def push_front(self, items: Sequence[Any]) -> None:
        """Insert items before all queued ones."""
        self._entries.extendleft(reversed(items))

    def pop(self) -> Any:
        entry = self._entries.popleft()
        if type(entry) is not _DeltaRun:
            return entry
        if self._open_runs.get(entry[0].index) is entry:
            del self._open_runs[entry[0].index]
        return merge_deltas(entry)
