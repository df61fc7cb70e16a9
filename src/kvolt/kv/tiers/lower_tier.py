"""LowerTier: what a tier below the host's memory is to those above it. And what is counted of any tier.

Blocks go down to it from slots of the host's memory and come back into such slots; it says which of them came whole.
All of this is called on the event loop; bytes move in threads, and no call returns before they are done with the slots
that it was given, cancelled or not.
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

_LATELY = 0.25
"""What the last load counts, where the speed of a tier is worked out."""
_MANY = 64
"""Blocks; of fewer it says less, since much of their time is that of any."""


@dataclass(slots=True)
class TierStats:
    """Of one tier, for metrics and for who chooses between fetching and computing."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_s: float = 0.0
    loaded_s: float = 0.0
    block_s: float | None = None
    """How long it takes to load one, by those that were lately."""
    store_block_s: float | None = None
    """To store one, of the batch that went fastest."""
    failures: Counter[str] = field(default_factory=Counter)
    """Blocks by what became of them: corrupt, unread, unwritten, no_room."""

    def stored(self, count: int, took_s: float) -> None:
        self.num_stored += count
        self.stored_s += took_s
        if count:
            each_s = took_s / count
            self.store_block_s = min(self.store_block_s or each_s, each_s)

    def loaded(self, count: int, took_s: float) -> None:
        self.num_loaded += count
        self.loaded_s += took_s
        self.block_s = _lately(self.block_s, count, took_s)


def _lately(before_s: float | None, count: int, took_s: float) -> float | None:
    if not count:
        return before_s
    each_s = took_s / count
    weight = _LATELY * min(count / _MANY, 1.0)
    # One slow load may be chance; a quick one is what it can do.
    return min((1 - weight) * (before_s or each_s) + weight * each_s, 2.0 * each_s)


class LowerTier(Protocol):
    """See the module. `start`, then anything, then `close`."""

    @property
    def tier(self) -> Tier: ...

    @property
    def stats(self) -> TierStats: ...

    @property
    def look_s(self) -> float | None:
        """How long a `look` takes, about; None for a tier that knows all it has, since nobody else writes there."""
        ...

    @property
    def num_slots(self) -> int | None:
        """Blocks that it can hold; None where that is not ours to say."""
        ...

    def __len__(self) -> int:
        """Blocks that it is known to have."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def has(self, key: BlockKey) -> bool:
        """Whether it can be asked for."""
        ...

    def knows(self, key: BlockKey) -> bool:
        """Whether it need not be offered: it is there, or on its way."""
        ...

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """Find out which of these it has, where `has` does not know all. Not for long, and never an error. `worth_s`:
        how long it may take, for a tier that would have to ask others in turn."""
        ...

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        """Keep what lies in these slots, as far as there is room. KvoltError where nothing could be."""
        ...

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        """Bring blocks into slots; the checksum of each that came whole. What did not is not found here any more."""
        ...

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """These, or all, as far as nobody is at them; how many."""
        ...

    @property
    def has_chores(self) -> bool:
        """Whether a `write`, be it of nothing, would clear something up."""
        ...

    def take_changes(self) -> tuple[Change, ...]:
        """Since the last time, for who routes. None of a tier that every worker reaches alike."""
        ...

    def check_integrity(self) -> None: ...


@runtime_checkable
class Inspecting(Protocol):
    """A tier that looks at what it is given to write."""

    on_spoiled: Callable[[BlockKey], None]
    """Told of a block whose bytes were not what they should be."""


@runtime_checkable
class Resizable(Protocol):
    """A tier whose size is ours to say."""

    @property
    def shape(self) -> BlockShape:
        """Of blocks as they lie there."""
        ...

    async def resize(self, num_slots: int) -> None:
        """So many blocks from now on. KvoltError where that cannot be."""
        ...
