"""What a stream keeps back while its reader is slow, sans-I/O.

In order; but the deltas of one choice pile up and become one delta when they may leave, so that a
stalled reader costs a list entry per token and not a copy of all tokens before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvolt.core.delta import Delta, merge_deltas


class _Pile(list[Delta]):
    """Deltas of one choice, to be merged."""


class Backlog:
    __slots__ = ("_entries", "_growing")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        self._growing: dict[int, _Pile] = {}
        """By choice: piles that nothing but deltas has come after."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: Any) -> bool:
        """Keep an item; whether it joined one that was there."""
        if type(item) is not Delta:
            self._growing.clear()
            self._entries.append(item)
            return False
        pile = self._growing.get(item.index)
        if pile is not None and pile[-1].finish is None:
            pile.append(item)
            return True
        pile = self._growing[item.index] = _Pile((item,))
        self._entries.append(pile)
        return False

    def add_first(self, items: Sequence[Any]) -> None:
        """Items that come before all that is kept."""
        self._entries.extendleft(reversed(items))

    def take(self) -> Any:
        entry = self._entries.popleft()
        if type(entry) is not _Pile:
            return entry
        if self._growing.get(entry[0].index) is entry:
            del self._growing[entry[0].index]
        return merge_deltas(entry)
