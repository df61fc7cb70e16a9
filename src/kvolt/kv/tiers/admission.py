"""Admission: which blocks that a device has completed are worth keeping below it. Pure.

By how deep they lie in their prompt, and by whose requests they are: beginnings are asked for again more often than
what follows, and some tenants' more than others'. A block is of those who asked for it; one of an answer, which nobody
has asked for yet, is of those of the block before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvolt.core.ids import BlockKey
from kvolt.core.request import RoutingHints
from kvolt.kv.tiers.slot_table import TierBlock

_MOST_KNOWN = 1 << 18


class Admission:
    """See the module."""

    def __init__(
        self, depth: int | None = None, min_priority: int | None = None, tenants: Iterable[str] = ()
    ) -> None:
        """`depth`: in blocks. None, and no tenant: whatever it is."""
        self._depth = depth
        self._min_priority = min_priority
        self._tenants = frozenset(tenants)
        self._wanted: OrderedDict[BlockKey, None] = OrderedDict()
        """Of requests that are to be kept. The oldest go: a block is completed soon after it was asked for."""

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def _asks_whose(self) -> bool:
        return self._min_priority is not None or bool(self._tenants)

    def asked(self, keys: Sequence[BlockKey], hints: RoutingHints) -> None:
        """A request came for these."""
        if not self._asks_whose:
            return
        if self._tenants and hints.tenant not in self._tenants:
            return
        if self._min_priority is not None and hints.priority < self._min_priority:
            return
        self._want(keys[: self._depth])

    def places(self, blocks: Sequence[TierBlock]) -> Sequence[int]:
        """Of blocks one below the other those that are worth it, by their places."""
        count = len(blocks)
        if self._depth is not None and blocks:
            count = min(count, max(self._depth - blocks[0].position, 0))
        if not self._asks_whose:
            return range(count)
        found: list[int] = []
        for place in range(count):
            block = blocks[place]
            if block.key in self._wanted or block.parent in self._wanted:
                found.append(place)
                self._want([block.key])
        return found

    def _want(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._wanted[key] = None
            self._wanted.move_to_end(key)
        while len(self._wanted) > _MOST_KNOWN:
            self._wanted.popitem(last=False)
