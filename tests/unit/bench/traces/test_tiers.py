"""What tiers would find of a trace."""

from __future__ import annotations

from kvolt.bench.traces.tiers import best_hits, found_in_tiers
from kvolt.core.trace import TraceRecord


def asked(*blocks: int) -> TraceRecord:
    return TraceRecord(
        timestamp=0.0, input_length=16 * len(blocks), output_length=1, hash_ids=blocks, block_size=16
    )


def test_a_block_counts_only_after_those_before_it() -> None:
    records = [asked(1, 2, 3), asked(1, 2, 3), asked(9, 2, 3)]
    assert found_in_tiers(records, [10]).by_tier == (3,)


def test_what_the_first_tier_lost_the_second_may_have() -> None:
    records = [asked(1, 2), asked(3, 4), asked(1, 2)]
    assert found_in_tiers(records, [2]).hit_rate == 0.0
    found = found_in_tiers(records, [2, 10])
    assert found.by_tier == (0, 2)


def test_nobody_passes_the_best() -> None:
    records = [asked(*range(start, start + 4)) for start in (0, 10, 0, 20, 10, 0, 30, 0)]
    for capacity in (4, 8, 12):
        num_asked, num_best = best_hits(records, capacity)
        assert num_asked == 32
        for rule in ("lru", "s3fifo", "tinylfu"):
            assert sum(found_in_tiers(records, [capacity], rule).by_tier) <= num_best
    assert best_hits(records, 100)[1] == 16
