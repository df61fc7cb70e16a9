"""ApproximateIndex: blocks that workers hold according to this router's own decisions. Pure: time is an
argument.

For workers without usable KV events. The prompt blocks of a request count as held from its first token until `ttl_s`
after their last use (Dynamo's TTL), or until the worker has been sent more blocks since than it can hold. Before the
first token a prompt is in `pending_blocks`. Blocks of answers are unknown here.

No timers per block: a rank has an index slot for each of a few generations. Used blocks are stored in the newest one;
the oldest is cleared when a new one starts. So an entry lives between three quarters of the TTL and all of it, renewal
is a store, and expiry clears many blocks at once:

    generation   0         1         2         3 (newest)
                 cleared   kept      kept      computed and reused blocks
                 next

A generation also ends at a third of the worker's blocks, because an engine with LRU eviction holds about as much as all
generations together.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId
from kvolt.router.index.prefix_index import MAX_SLOTS, BlockIndex
from kvolt.router.index.prefix_index_python import Hashes

GENERATIONS = 4
MAX_WORKER_RANKS = MAX_SLOTS // GENERATIONS

DEFAULT_TTL_S = 120.0
DEFAULT_MAX_BYTES = 256 << 20


class ApproximateOptions(msgspec.Struct, frozen=True, kw_only=True):
    ttl_s: float = DEFAULT_TTL_S
    """Time that a block counts as held after its last use."""
    max_bytes: int = DEFAULT_MAX_BYTES
    """Beyond it the least recently used blocks are evicted, of one prompt the deepest first."""


@dataclass(slots=True)
class _RankGenerations:
    """Generations of one worker rank."""

    number: int
    max_generation_blocks: int
    """Bound of one generation; 0 if the worker's capacity is unknown."""
    newest: int = 0
    ends_at: float | None = None
    """End of the newest generation; None while the rank is empty."""

    def slot(self, generation: int) -> int:
        return self.number * GENERATIONS + generation


class ApproximateIndex:
    """See the module. The slot of a rank in the result of `find` is its number."""

    def __init__(self, options: ApproximateOptions | None = None) -> None:
        self._options = options or ApproximateOptions()
        self._generation_s = self._options.ttl_s / GENERATIONS
        self._index = BlockIndex(self._options.max_bytes)
        self._by_rank: dict[tuple[InstanceId, int], _RankGenerations] = {}
        self._by_number: dict[int, _RankGenerations] = {}
        self._num_slots = 0
        self._ends: list[tuple[float, int]] = []
        """Heap of (end, number) of newest generations. Entries of generations that ended early are skipped."""

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def num_entries(self) -> int:
        """Pairs of block and worker; a block may count once per generation."""
        return self._index.num_pairs

    @property
    def num_worker_ranks(self) -> int:
        return len(self._by_rank)

    @property
    def num_slots(self) -> int:
        """Slots in the result of `find`; never decreases."""
        return self._num_slots

    @property
    def worker_ranks(self) -> list[tuple[InstanceId, int]]:
        return list(self._by_rank)

    # --- worker ranks

    def add_worker(self, instance_id: InstanceId, dp_rank: int = 0, total_blocks: int = 0) -> bool:
        """Add a rank; return whether it has a slot (at most MAX_WORKER_RANKS do). Idempotent."""
        key = (instance_id, dp_rank)
        if key in self._by_rank:
            return True
        if len(self._by_rank) == MAX_WORKER_RANKS:
            return False
        # Slots are allocated and freed by generations, lowest first: those of a rank are adjacent.
        slots = [self._index.add_worker() for _ in range(GENERATIONS)]
        max_blocks = -(-total_blocks // (GENERATIONS - 1))
        rank = self._by_rank[key] = _RankGenerations(slots[0] // GENERATIONS, max_blocks)
        self._by_number[rank.number] = rank
        self._num_slots = max(self._num_slots, rank.number + 1)
        return True

    def drop_worker(self, instance_id: InstanceId, dp_rank: int = 0) -> None:
        """Remove a rank. Unknown ranks are ignored."""
        rank = self._by_rank.pop((instance_id, dp_rank), None)
        if rank is None:
            return
        del self._by_number[rank.number]
        for generation in range(GENERATIONS):
            self._index.remove_worker(rank.slot(generation))

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """Slot of a rank; None if it has none."""
        rank = self._by_rank.get((instance_id, dp_rank))
        return None if rank is None else rank.number

    # --- blocks

    def record_prefill(self, instance_id: InstanceId, dp_rank: int, hashes: Hashes, now: float) -> None:
        """Record that the worker computed or reused these leading blocks of a prompt."""
        rank = self._by_rank.get((instance_id, dp_rank))
        if rank is None or not len(hashes):
            return
        self._expire_generations(now)
        if rank.ends_at is None:
            self._start_generation(rank, now)
        self._index.store(rank.slot(rank.newest), hashes)
        num_newest, _ = self._index.digest(rank.slot(rank.newest))
        if rank.max_generation_blocks and num_newest >= rank.max_generation_blocks:
            self._rotate(rank)
            self._start_generation(rank, now)

    def find(self, hashes: Hashes, now: float) -> npt.NDArray[np.int32]:
        """Number of leading blocks of a prompt that each rank holds, by slot."""
        self._expire_generations(now)
        if not self._num_slots:
            return np.zeros(0, dtype=np.int32)
        # A prompt is stored in one generation as a whole, so one of them has its longest match.
        depths: npt.NDArray[np.int32] = self._index.find(hashes).reshape(-1, GENERATIONS).max(axis=1)
        return depths

    # --- generations

    def _start_generation(self, rank: _RankGenerations, now: float) -> None:
        rank.ends_at = now + self._generation_s
        heappush(self._ends, (rank.ends_at, rank.number))

    def _rotate(self, rank: _RankGenerations) -> None:
        rank.newest = (rank.newest + 1) % GENERATIONS
        self._index.clear(rank.slot(rank.newest))

    def _expire_generations(self, now: float) -> None:
        """End due generations of all ranks, at most one per rank and period however late this is called."""
        while self._ends and self._ends[0][0] <= now:
            ended_at, number = heappop(self._ends)
            rank = self._by_number.get(number)
            if rank is None or rank.ends_at != ended_at:
                continue
            self._rotate(rank)
            if any(self._index.digest(rank.slot(each))[0] for each in range(GENERATIONS)):
                self._start_generation(rank, ended_at)
            else:
                rank.ends_at = None

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: visits the whole index."""
        self._index.check_integrity()
        live = {(rank.ends_at, rank.number) for rank in self._by_number.values()}
        for rank in self._by_number.values():
            is_empty = not any(self._index.digest(rank.slot(each))[0] for each in range(GENERATIONS))
            if not is_empty and (rank.ends_at, rank.number) not in self._ends:
                raise AssertionError("a rank with blocks has no end time")
        if len(live) != len(self._by_rank):
            raise AssertionError("two ranks share a number")
