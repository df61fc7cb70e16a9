"""The benchmark beside Dynamo's replay: goals are held against the figures."""

from __future__ import annotations

import pytest
from benchmarks.load.metered import Usage
from benchmarks.twin import speed
from benchmarks.twin.replays import KVOLT, LATENCIES, PEER, STATISTICS, Replayed


def replayed(system: str, wall_s: float, ms: float = 10.0) -> Replayed:
    latencies = {name: dict.fromkeys(STATISTICS, ms) for name in LATENCIES}
    return Replayed(system, Usage(0, wall_s, wall_s, 1 << 20), 5, 50, 0.5, latencies, wall_s / 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "missed"),
    [
        (replayed(KVOLT, 5.0), replayed(PEER, 6.0), []),
        (replayed(KVOLT, 7.0), replayed(PEER, 6.0), ["faster than the peer"]),
        (replayed(KVOLT, 5.0, 11.0), replayed(PEER, 6.0), ["same latencies within 5%"]),
        (replayed(KVOLT, 25.0), replayed(PEER, 26.0), ["wall time under 20 s"]),
    ],
)
def test_goals(ours: Replayed, theirs: Replayed, missed: list[str]) -> None:
    text = speed.text("a trace", [ours, theirs])
    told = [line for line in text.splitlines() if line.startswith("goal missed")]
    assert len(told) == len(missed)
    assert all(name in line for name, line in zip(missed, told, strict=True))
