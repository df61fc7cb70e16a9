"""TierAdmission: selects completed device blocks to keep in the tiers. Pure.

By position in the prompt and by priority and tenant of the request: beginnings of prompts are reused more often than
their ends, and some tenants' prompts more than others'. Blocks of an output belong to the request of the preceding
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvolt.core.ids import BlockKey
from kvolt.core.request import RoutingHints
from kvolt.kv.tiers.lower_tier import KnownKeys
from kvolt.kv.tiers.slot_table import TierBlock


class TierAdmission:
    """See the module."""

    def __init__(
        self, depth: int | None = None, min_priority: int | None = None, tenants: Iterable[str] = ()
    ) -> None:
        """`depth`: maximum position in blocks. None and no tenants: no restriction."""
        self._depth = depth
        self._min_priority = min_priority
        self._tenants = frozenset(tenants)
        self._admitted = KnownKeys()
        """Blocks of admitted requests, bounded: a block is completed soon after its request."""

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def _checks_requests(self) -> bool:
        return self._min_priority is not None or bool(self._tenants)

    def add_request(self, keys: Sequence[BlockKey], hints: RoutingHints) -> None:
        """Record the blocks of a request if it is admitted."""
        if not self._checks_requests:
            return
        if self._tenants and hints.tenant not in self._tenants:
            return
        if self._min_priority is not None and hints.priority < self._min_priority:
            return
        self._admitted.add(keys[: self._depth])

    def admitted_indexes(self, blocks: Sequence[TierBlock]) -> Sequence[int]:
        """Indexes of the admitted ones of consecutive blocks."""
        count = len(blocks)
        if self._depth is not None and blocks:
            count = min(count, max(self._depth - blocks[0].position, 0))
        if not self._checks_requests:
            return range(count)
        indexes: list[int] = []
        for index in range(count):
            block = blocks[index]
            if block.key in self._admitted or block.parent in self._admitted:
                indexes.append(index)
                self._admitted.add([block.key])
        return indexes
