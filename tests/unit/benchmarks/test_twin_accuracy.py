"""The verdicts of the accuracy study: within a tenth, within the spread, or missed; and never of unlike work."""

import random

import pytest
from benchmarks.twin.accuracy_judge import IN_SPREAD, JUDGED, MISSED, NEAR, NOT_JUDGED, judge
from benchmarks.twin.bursts import PAUSE_S, as_one, bursts_of
from msgspec.structs import replace

from kvolt.bench.load.report import BenchReport, RunFacts, make_report
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.tally import Tally
from kvolt.bench.traces import small_trace


def report(
    first_s: float,
    *,
    gap_s: float = 0.01,
    cached: int | None = 40,
    tokens: int = 5,
    events: int | None = None,
) -> BenchReport:
    """Of one request with its first token after `first_s`."""
    tally = Tally(None, random.Random(0).random)
    tally.started(0.0)
    for _ in range(tokens - 1):
        tally.on_gap(gap_s)
    last_s = first_s + gap_s * (tokens - 1)
    tally.add(
        Sample(
            number=0,
            session=0,
            turn=0,
            due_s=0.0,
            started_s=0.0,
            sent_s=0.0,
            first_s=first_s,
            second_s=first_s + gap_s,
            last_s=last_s,
            end_s=last_s,
            max_gap_s=gap_s,
            num_events=tokens if events is None else events,
            input_tokens=100,
            output_tokens=tokens,
            cached_tokens=cached,
        )
    )
    facts = RunFacts(url="", model="", started_at=0.0, settings={}, is_interrupted=False, open_loop=True)
    return make_report(facts, tally)


def verdicts(twin: BenchReport, *real: BenchReport) -> dict[str, str]:
    return {line.figure.rsplit(" ", 1)[0]: line.verdict for line in judge(twin, real)}


def test_within_a_tenth_of_the_median_on_either_side() -> None:
    assert verdicts(report(1.09), report(1.0))["ttft p50"] == NEAR
    assert verdicts(report(0.91), report(1.0))["ttft p90"] == NEAR
    assert verdicts(report(1.12), report(1.0))["ttft p50"] == MISSED
    assert verdicts(report(1.0, gap_s=0.0088), report(1.0))["itl p50"] == MISSED


def test_what_a_real_run_showed_is_no_miss() -> None:
    real = [report(1.0), report(1.0), report(1.3)]
    assert verdicts(report(1.25), *real)["ttft p50"] == IN_SPREAD
    assert verdicts(report(1.35), *real)["ttft p50"] == MISSED


def test_the_hit_rate_is_judged_in_points_whatever_the_spread() -> None:
    real = [report(1.0, cached=40), report(1.0, cached=40), report(1.0, cached=60)]
    assert verdicts(report(1.0, cached=41), *real)["hit rate"] == NEAR
    assert verdicts(report(1.0, cached=42), *real)["hit rate"] == MISSED


def test_other_figures_are_told_and_not_judged() -> None:
    found = verdicts(report(9.0), report(1.0))
    assert found["e2e p50"] == NOT_JUDGED
    assert list(found.values()).count(NOT_JUDGED) == len(found) - len(JUDGED)


def test_a_row_tells_twin_spread_and_difference() -> None:
    lines = {line.figure: line for line in judge(report(1.1), [report(1.0), report(1.0), report(2.0)])}
    _, _, real, difference, verdict = lines["ttft p50 ms"].cells
    assert real.count("..") == 1
    assert difference.startswith("+10.")
    assert verdict == "within the spread"
    assert lines["hit rate %"].cells[1:4] == ("40.00", "40.00 (40.00..40.00)", "+0.0 points")


@pytest.mark.parametrize("real", [report(1.0, tokens=6), report(1.0, cached=None), report(1.0, events=4)])
def test_unlike_work_has_no_verdict(real: BenchReport) -> None:
    with pytest.raises(ValueError, match=r"in a real run|no cached tokens|not those between tokens"):
        judge(report(1.0), [real])


def test_a_trace_with_pauses_falls_into_its_bursts_again() -> None:
    records = small_trace()[:200]
    paused = [
        replace(each, timestamp=each.timestamp + each.timestamp // 2000 * 1e3 * PAUSE_S) for each in records
    ]
    bursts = bursts_of(paused)
    assert len(bursts) > 3
    assert [each.hash_ids for burst in bursts for each in burst] == [each.hash_ids for each in records]
    assert all(burst[0].timestamp == 0 and burst[-1].timestamp <= 2000 for burst in bursts)
    assert bursts_of(records) == [records]


def test_reports_of_bursts_are_one_report() -> None:
    whole = as_one([report(1.0), report(3.0), report(2.0)])
    assert whole.counts.complete == 3
    assert whole.counts.cached_tokens == 120
    assert whole.latencies["ttft"].p50 == pytest.approx(2.0, rel=0.02)
    assert whole.latencies["ttft"].max == pytest.approx(3.0)
    assert as_one([report(1.0), report(1.0, cached=None)]).counts.cached_tokens is None
