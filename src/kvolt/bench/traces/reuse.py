"""How much of a trace's prompts a prefix cache could find: without bound, and with LRU caches of several sizes at once.

For an LRU cache only one number matters: how many other blocks were used since a block's last use. With `distance` of
them, caches of more than `distance` blocks still have it. So one pass gives the hit rate for every size (Mattson 1970).

A request uses all its blocks at once, the first one last, as engines free them: so a block never outlives the one
before it, and what a request shares with an earlier one is a run of blocks whose distances count up by one. That makes
a run, and not a block, the unit of work: blocks are counted per request that used them last, in a Fenwick tree.

Memory grows with the number of different blocks: that is what a cache without bound is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvolt.bench.traces.distribution import Distribution, distribution
from kvolt.bench.traces.prefixes import ROOT, link
from kvolt.core.trace import TraceRecord


class LruRate(msgspec.Struct, frozen=True):
    """What an LRU cache of so many blocks would have found."""

    blocks: int
    hit_rate: float


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are shares of all blocks of all prompts, the first time included; partial last blocks count as blocks."""

    blocks: int
    distinct_blocks: int
    hit_rate: float
    """Of a cache without bound."""
    token_hit_rate: float
    """The same in tokens."""
    requests_with_reuse: float
    """Share of requests that find at least one block."""
    lru: tuple[LruRate, ...]
    distance: Distribution | None
    """Other blocks used between two uses of a block; None where no block is used twice."""


class ReuseMeter:
    """Takes records in order of time."""

    def __init__(self, lru_blocks: Sequence[int] = ()) -> None:
        self._capacities = sorted(set(lru_blocks))
        self._capacity_hits = [0] * len(self._capacities)
        self._last_use: dict[int, int] = {}
        """By chained id, so that ids need not be unique in themselves: the request that used the block last."""
        self._live = _Fenwick()
        """By request: how many blocks it is the last user of."""
        self._distances: Counter[int] = Counter()
        self._requests = self._reusing = 0
        self._blocks = self._hits = 0
        self._tokens = self._hit_tokens = 0

    def add(self, record: TraceRecord) -> None:
        if not record.hash_ids:
            return
        now = len(self._live)
        chains = list(_chains(record))
        runs = list(self._runs(chains))
        for user, length in runs:
            # All blocks that were used after `user` came, which includes the runs before this one.
            self._count_run(len(self._last_use) - self._live.sum_through(user), length)
        for user, length in runs:
            self._live.add(user, -length)
        hits = sum(length for _, length in runs)
        for chained in chains:
            self._last_use[chained] = now
        self._live.append(len(chains))
        self._requests += 1
        self._reusing += hits > 0
        self._blocks += len(chains)
        self._hits += hits
        self._tokens += record.input_length
        self._hit_tokens += min(hits * record.block_size, record.input_length)

    def result(self) -> Reuse | None:
        """None where no record had hash ids."""
        if not self._blocks:
            return None
        rates = zip(self._capacities, self._capacity_hits, strict=True)
        return Reuse(
            blocks=self._blocks,
            distinct_blocks=len(self._last_use),
            hit_rate=self._hits / self._blocks,
            token_hit_rate=self._hit_tokens / self._tokens,
            requests_with_reuse=self._reusing / self._requests,
            lru=tuple(LruRate(blocks, hits / self._blocks) for blocks, hits in rates),
            distance=distribution(self._distances),
        )

    def _runs(self, chains: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Leading blocks that were seen before, as (last user, how many in a row)."""
        user: int | None = None
        length = 0
        for chained in chains:
            found = self._last_use.get(chained)
            if found != user:
                if user is not None:
                    yield user, length
                user, length = found, 0
            if found is None:
                return
            length += 1
        if user is not None:
            yield user, length

    def _count_run(self, distance: int, length: int) -> None:
        self._distances.update(range(distance, distance + length))
        for index, capacity in enumerate(self._capacities):
            self._capacity_hits[index] += max(0, min(length, capacity - distance))


def _chains(record: TraceRecord) -> Iterator[int]:
    chained = ROOT
    for key in record.hash_ids:
        chained = link(chained, key)
        yield chained


class _Fenwick:
    """Numbers in a row with sums of beginnings; a change, a sum and one more number each cost O(log n)."""

    def __init__(self) -> None:
        self._tree = [0]

    def __len__(self) -> int:
        return len(self._tree) - 1

    def append(self, value: int) -> None:
        place = len(self._tree)
        step = 1
        while step < place & -place:
            value += self._tree[place - step]
            step <<= 1
        self._tree.append(value)

    def add(self, index: int, change: int) -> None:
        place = index + 1
        while place < len(self._tree):
            self._tree[place] += change
            place += place & -place

    def sum_through(self, index: int) -> int:
        place = index + 1
        total = 0
        while place:
            total += self._tree[place]
            place &= place - 1
        return total
