"""LowerTier: a tier below the host tier; TierStats: counters of any tier.

Blocks are written from slots of host memory and read back into such slots, with a checksum per block. Called on the
event loop; bytes move in threads, and no call returns, even when cancelled, before its threads are done with the slots.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field

from kvolt.core.errors import Unsupported
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import SlotTable, TierBlock
from kvolt.transfer.memory.slabs import Numbers

_LAST_WEIGHT = 0.25
"""Weight of the last load in the moving average of the tier's speed."""
MAX_KNOWN_KEYS = 1 << 18
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


class KnownKeys:
    """Bounded cache of keys. Evicts the oldest."""

    def __init__(self, max_keys: int = MAX_KNOWN_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey | None) -> bool:
        return key in self._keys

    def keys(self) -> KeysView[BlockKey]:
        return self._keys.keys()

    def num_known(self, keys: Sequence[BlockKey]) -> int:
        """Length of the known prefix."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_keys:
            self._keys.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey] | None = None) -> None:
        """Remove these keys, or all."""
        if keys is None:
            self._keys.clear()
            return
        for key in keys:
            self._keys.pop(key, None)


class LowerTier(ABC):
    """See the module. Call `start` first and `close` last.

    The defaults are those of a tier that is not under this worker's control and has nothing to publish.
    """

    tier: Tier
    lookup_s: float | None = None
    """Approximate time of a `lookup`; None if the index is complete, since only this worker writes there."""
    shape: BlockShape | None = None
    """Shape of the stored blocks, if it differs from that in host memory."""

    def __init__(self) -> None:
        self.stats = TierStats()
        self.on_corrupt: Callable[[BlockKey], None] = lambda key: None
        """Called for each block that failed its checksum when it was to be written."""

    @property
    def num_slots(self) -> int | None:
        """Capacity in blocks; None if not under this worker's control."""
        return None

    @property
    def has_pending_work(self) -> bool:
        """Whether a `write`, even of no block, would do pending cleanup."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """Number of known blocks."""

    async def start(self) -> None:  # noqa: B027 (optional)
        """Load the index, if there is one."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def has(self, key: BlockKey) -> bool:
        """Whether the block is known to be readable."""

    @abstractmethod
    def has_or_pending(self, key: BlockKey) -> bool:
        """Whether the block is here or being written, so that it need not be written."""

    async def lookup(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:  # noqa: B027
        """Query which of these blocks exist, if `has` is incomplete. Bounded in time; never raises. `worth_s`: time
        limit for a tier that has to query others."""

    @abstractmethod
    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        """Store the blocks in these slots as far as there is room. KvoltError if none could be stored."""

    @abstractmethod
    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        """Read blocks into slots; return the checksum of each intact block. Others are removed from the index."""

    @abstractmethod
    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """Remove these blocks, or all, unless held; return how many."""

    async def resize(self, num_slots: int) -> None:
        """Change the capacity in blocks. KvoltError if not possible."""
        raise not_resizable(self.tier)

    def take_changes(self) -> tuple[Change, ...]:
        """Changes since the last call, for routers. Empty for a tier that all workers reach equally."""
        return ()

    def check_integrity(self) -> None:  # noqa: B027
        """AssertionError if the index is inconsistent."""


class SlotTableTier(LowerTier):
    """Tier of this worker only, with a complete index."""

    def __init__(self, slot_table: SlotTable) -> None:
        super().__init__()
        self.slot_table = slot_table

    @property
    def num_slots(self) -> int:
        return self.slot_table.num_slots

    def __len__(self) -> int:
        return len(self.slot_table)

    def has(self, key: BlockKey) -> bool:
        return self.slot_table.has(key)

    def has_or_pending(self, key: BlockKey) -> bool:
        return self.slot_table.has_or_pending(key)

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        return self.slot_table.forget(self.slot_table if keys is None else keys)

    def take_changes(self) -> tuple[Change, ...]:
        return self.slot_table.take_changes()

    def check_integrity(self) -> None:
        self.slot_table.check_integrity()


class SharedTier(LowerTier):
    """Tier of several workers, with a cache of known blocks.

    Others write and remove blocks there, so the cache may be wrong until a read corrects it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownKeys()
        """Recently read or written, or found by `lookup`."""
        self._writing: set[BlockKey] = set()

    def __len__(self) -> int:
        return len(self._known)

    def has(self, key: BlockKey) -> bool:
        return key in self._known

    def has_or_pending(self, key: BlockKey) -> bool:
        return key in self._known or key in self._writing

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """Remove blocks from the cache; they stay in the tier."""
        self._known.forget(keys)
        return 0


def not_resizable(tier: Tier) -> Unsupported:
    return Unsupported(f"the {tier} tier does not exist or cannot be resized", feature=f"resize {tier}")
