"""Prefix cache hit rates of a trace, for an unbounded cache and LRU caches of several sizes, in one pass.

LRU hits depend only on the reuse distance, the number of other blocks used since a block's last use: caches of more
than `distance` blocks still hold it. One pass gives the hit rate for every size (Mattson 1970).

A request uses all its blocks at once, the first one last, as engines free them: a block never outlives its parent, and
the blocks shared with an earlier request are a run whose distances increase by one. Work is therefore per run, not per
block: blocks are counted by the request that used them last, in a Fenwick tree.

Memory grows with the number of distinct blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvolt.bench.traces.prefixes import ROOT, link
from kvolt.core.trace import TraceRecord


class LruRate(msgspec.Struct, frozen=True):
    """Hit rate of an LRU cache of this size."""

    blocks: int
    hit_rate: float


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates as fractions of all prompt blocks, including first uses; partial blocks count as blocks."""

    blocks: int
    distinct_blocks: int
    hit_rate: float
    """Hit rate of an unbounded cache, in blocks."""
    token_hit_rate: float
    """Hit rate of an unbounded cache, in tokens."""
    requests_with_reuse: float
    """Fraction of requests that hit at least one block."""
    lru: tuple[LruRate, ...]
    distance: Distribution | None
    """Distribution of reuse distances in blocks; None without reuse."""


class ReuseMeter:
    """Accumulates records in order of time."""

    def __init__(self, lru_blocks: Sequence[int] = ()) -> None:
        self._capacities = sorted(set(lru_blocks))
        self._capacity_hits = [0] * len(self._capacities)
        self._last_use: dict[int, int] = {}
        """Request that used each block last, by chained id (ids alone need not be unique)."""
        self._live = _Fenwick()
        """Number of blocks by the request that used them last."""
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
            # All blocks used since `user`, including the previous runs of this request.
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
        """Return the result; None if no record had hash ids."""
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
        """Runs of leading blocks that were used before, as (last user, length)."""
        user: int | None = None
        length = 0
        for chained in chains:
            last_user = self._last_use.get(chained)
            if last_user != user:
                if user is not None:
                    yield user, length
                user, length = last_user, 0
            if last_user is None:
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
    """Fenwick tree: prefix sums with O(log n) updates and appends."""

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


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Summary statistics. Percentiles are nearest-rank values."""

    count: int
    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(counts: Mapping[int, int]) -> Distribution | None:
    """Summarize values given by their counts; None without values."""
    count = sum(counts.values())
    if not count:
        return None
    values = sorted(counts)
    return Distribution(
        count=count,
        min=values[0],
        mean=sum(value * times for value, times in counts.items()) / count,
        p50=_percentile(values, counts, 50, count),
        p90=_percentile(values, counts, 90, count),
        p99=_percentile(values, counts, 99, count),
        max=values[-1],
    )


def _percentile(values: list[int], counts: Mapping[int, int], percent: int, count: int) -> int:
    rank = -(-percent * count // 100)
    num_seen = 0
    for value in values:
        num_seen += counts[value]
        if num_seen >= rank:
            return value
    raise AssertionError("the maximum covers every percentile")
