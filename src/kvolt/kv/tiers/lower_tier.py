"""LowerTier: interface of a tier below the host tier; TierStats: counters of any tier.

Blocks are written from slots of host memory and read back into such slots, with a checksum per block. Called on the
event loop; bytes move in threads, and no call returns, even when cancelled, before its threads are done with the slots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.memory.slabs import Numbers

_LAST_WEIGHT = 0.25
"""Weight of the last load in the moving average of the tier's speed."""
_FULL_WEIGHT_BLOCKS = 64
"""Blocks of a load with full weight; smaller loads count less, since fixed costs dominate them."""


@dataclass(slots=True)
class TierStats:
    """Counters of one tier, for metrics and for the choice between loading and computing."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_s: float = 0.0
    loaded_s: float = 0.0
    block_s: float | None = None
    """Time to load one block, moving average."""
    store_block_s: float | None = None
    """Time to store one block, of the fastest batch."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed blocks by reason: corrupt, unread, unwritten, no_room, late, gone."""

    def record_stored(self, count: int, elapsed_s: float) -> None:
        self.num_stored += count
        self.stored_s += elapsed_s
        if count:
            each_s = elapsed_s / count
            self.store_block_s = min(self.store_block_s or each_s, each_s)

    def record_loaded(self, count: int, elapsed_s: float) -> None:
        self.num_loaded += count
        self.loaded_s += elapsed_s
        self.block_s = _moving_average(self.block_s, count, elapsed_s)


def _moving_average(before_s: float | None, count: int, elapsed_s: float) -> float | None:
    if not count:
        return before_s
    each_s = elapsed_s / count
    weight = _LAST_WEIGHT * min(count / _FULL_WEIGHT_BLOCKS, 1.0)
    # Bounded by twice the last value, so that a fast load counts at once and a slow one gradually.
    return min((1 - weight) * (before_s or each_s) + weight * each_s, 2.0 * each_s)


class LowerTier(Protocol):
    """See the module. Call `start` first and `close` last."""

    @property
    def tier(self) -> Tier: ...

    @property
    def stats(self) -> TierStats: ...

    @property
    def lookup_s(self) -> float | None:
        """Approximate time of a `lookup`; None if the index is complete, since only this worker writes there."""
        ...

    @property
    def num_slots(self) -> int | None:
        """Capacity in blocks; None if not under this worker's control."""
        ...

    def __len__(self) -> int:
        """Number of known blocks."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def has(self, key: BlockKey) -> bool:
        """Whether the block is known to be readable."""
        ...

    def has_or_pending(self, key: BlockKey) -> bool:
        """Whether the block is here or being written, so that it need not be written."""
        ...

    async def lookup(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """Query which of these blocks exist, if `has` is incomplete. Bounded in time; never raises. `worth_s`: time
        limit for a tier that has to query others."""
        ...

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        """Store the blocks in these slots as far as there is room. KvoltError if none could be stored."""
        ...

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        """Read blocks into slots; return the checksum of each intact block. Others are removed from the index."""
        ...

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """Remove these blocks, or all, unless held; return how many."""
        ...

    @property
    def has_pending_work(self) -> bool:
        """Whether a `write`, even of no block, would do pending cleanup."""
        ...

    def take_changes(self) -> tuple[Change, ...]:
        """Changes since the last call, for routers. Empty for a tier that all workers reach equally."""
        ...

    def check_integrity(self) -> None: ...


@runtime_checkable
class CorruptionReporter(Protocol):
    """Tier that verifies blocks before it writes them."""

    on_corrupt: Callable[[BlockKey], None]
    """Called for each block that failed its checksum."""


@runtime_checkable
class Resizable(Protocol):
    """Tier with a configurable size."""

    @property
    def shape(self) -> BlockShape:
        """Shape of the stored blocks."""
        ...

    async def resize(self, num_slots: int) -> None:
        """Change the capacity in blocks. KvoltError if not possible."""
        ...
