"""The benchmark beside Dynamo's replay: a grown cluster has the same load, and goals are held against the figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.load.metered import Usage
from benchmarks.twin import speed
from benchmarks.twin.replays import KVOLT, LATENCIES, PEER, STATISTICS, Replayed
from benchmarks.twin.scaling import FEWEST_WORKERS, Scaled, copies_of, run_scaled

from kvolt.bench.traces import limit, small_trace, write_trace


def test_each_worker_of_a_grown_cluster_gets_what_one_of_the_small_one_gets() -> None:
    records = small_trace()[:64]
    grown = list(copies_of(records, 4))
    workers = [grown[at :: 4 * FEWEST_WORKERS] for at in range(4 * FEWEST_WORKERS)]
    for at, mine in enumerate(workers):
        same = records[at // 4 :: FEWEST_WORKERS]
        assert [(one.timestamp, one.input_length) for one in mine] == [
            (one.timestamp, one.input_length) for one in same
        ]
    assert not set(workers[0][0].hash_ids) & set(workers[1][0].hash_ids)


def test_a_grown_cluster_answers_as_the_small_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, limit(small_trace(), 24))
    small, large = (run_scaled(path, 24, copies) for copies in (1, 2))
    assert (small.num_workers, large.num_workers) == (8, 16)
    assert (small.num_whole, large.num_whole) == (24, 48)
    assert large.mean_ttft_ms == pytest.approx(small.mean_ttft_ms)
    assert large.mean_e2e_ms == pytest.approx(small.mean_e2e_ms)


def replayed(system: str, wall_s: float, ms: float = 10.0) -> Replayed:
    latencies = {name: dict.fromkeys(STATISTICS, ms) for name in LATENCIES}
    return Replayed(system, Usage(0, wall_s, wall_s, 1 << 20), 5, 50, 0.5, latencies, wall_s / 2)


def scaled(workers: int, us: float, e2e_ms: float = 7.0) -> Scaled:
    return Scaled(workers, 10, 10, 10 * us / 1e6, 1 << 20, 1.0, e2e_ms)


@pytest.mark.parametrize(
    ("ours", "theirs", "grown", "missed"),
    [
        (replayed(KVOLT, 5.0), replayed(PEER, 6.0), scaled(256, 125), []),
        (replayed(KVOLT, 7.0), replayed(PEER, 6.0), scaled(256, 125), ["faster than the peer"]),
        (replayed(KVOLT, 5.0, 11.0), replayed(PEER, 6.0), scaled(256, 125), ["same latencies within 5%"]),
        (replayed(KVOLT, 5.0), replayed(PEER, 6.0), scaled(256, 135), ["a request on 256 workers"]),
        (replayed(KVOLT, 5.0), replayed(PEER, 6.0), scaled(256, 125, 8.0), ["the same latencies on both"]),
        (replayed(KVOLT, 25.0), replayed(PEER, 26.0), scaled(256, 125), ["wall time under 20 s"]),
    ],
)
def test_goals(ours: Replayed, theirs: Replayed, grown: Scaled, missed: list[str]) -> None:
    text = speed.text("a trace", [ours, theirs], [scaled(8, 100), grown])
    told = [line for line in text.splitlines() if line.startswith("goal missed")]
    assert len(told) == len(missed)
    assert all(name in line for name, line in zip(missed, told, strict=True))
