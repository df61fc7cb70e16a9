"""The study of routers: what a seed changes, where round-robin stops following, goals held against the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.harness import in_processes, interval
from benchmarks.router import gains, gains_report, gains_runs
from benchmarks.router.gains_report import PeerRow
from benchmarks.router.gains_runs import (
    CLASSIC,
    LATENCY,
    ROUND_ROBIN,
    Figures,
    Found,
    Point,
    Row,
    Search,
    records_of,
    saturation,
    solve,
)
from benchmarks.studies import KeptRows


@pytest.fixture(autouse=True)
def _own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVOLT_TRACES", raising=False)
    monkeypatch.setattr(gains_runs, "num_own_requests", gains_runs.num_own_requests)  # `--smoke` sets another


def point(router: str = ROUND_ROBIN, **more: float) -> Point:
    given = {"weight": 0.0, "seed": 1, "rate_per_s": 10.0, "num_requests": 40, "num_warm": 10, **more}
    return Point(router, **given)  # type: ignore[arg-type]


def test_a_seed_is_a_stretch_of_the_trace() -> None:
    one, same, other = (records_of(point(seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert [each.hash_ids for each in one] != [each.hash_ids for each in other]
    assert len(one) == len(other) == 40
    assert one[0].timestamp == 0.0


def test_a_rate_is_a_rate() -> None:
    records = records_of(point(num_requests=2000, rate_per_s=20.0))
    assert 2e6 / records[-1].timestamp == pytest.approx(20.0, rel=0.25)


def test_a_point_has_figures_and_they_follow_from_it() -> None:
    first, second = (solve(point(LATENCY, rate_per_s=20.0)) for _ in range(2))
    assert first == second
    assert first.figures.num_failed == 0
    assert first.figures.ttft_p99_ms >= first.figures.ttft_mean_ms > 0
    assert first.figures.hit_rate >= solve(point(rate_per_s=20.0)).figures.hit_rate
    assert 0.5 < first.figures.followed <= 1.0


@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (4.0, 20.0), (30.0, 40.0)])
def test_the_search_ends_where_it_stops_following(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    limit = 9.0

    def solved(asked: Point) -> Row:
        return row(asked.router, followed=1.0 if asked.rate_per_s <= limit else 0.5)

    monkeypatch.setattr(gains_runs, "solve", solved)
    found = saturation(Search(100, low, high))
    assert found.rate_per_s <= limit < found.rate_per_s * 1.031
    assert {share for rate, share in found.tried if rate <= limit} == {1.0}


def test_work_in_processes_comes_back() -> None:
    asked = [point(seed=seed, num_requests=4, num_warm=0) for seed in (1, 2)]
    assert dict(in_processes(records_of, asked, 2)) == {each: records_of(each) for each in asked}


# --- rows that are kept


def test_rows_are_kept_until_the_sources_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    kept = KeptRows(tmp_path, "rows", Row)
    kept.add("a", row(LATENCY))
    kept.add("b", row(CLASSIC))
    path.write_bytes(path.read_bytes()[:-10])  # the last line is torn
    again = KeptRows(tmp_path, "rows", Row)
    assert (len(again), again.get("a"), again.get("b")) == (1, row(LATENCY), None)
    monkeypatch.setattr("benchmarks.studies.sources_digest", lambda: "others")
    changed = KeptRows(tmp_path, "rows", Row)
    assert changed.get("a") is None
    changed.remove()
    assert not path.exists()


def test_kept_rows_are_not_computed_again() -> None:
    kept = KeptRows(None, "rows", Row)
    jobs = [point(seed=seed) for seed in (1, 2)]
    kept.add(str(jobs[1]), row(LATENCY))
    assert kept.solve(lambda job: row(CLASSIC, job.seed), jobs, 1) == [row(CLASSIC, 1), row(LATENCY)]


def test_intervals_are_student_s() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert interval([5.0]).half == 0.0
    assert interval([0.0, 2.0] * 20).half == pytest.approx(1.96 * 1.0127 / 40**0.5, rel=1e-3)


# --- the report


def row(
    router: str, seed: int = 0, ttft_ms: float = 100.0, weight: float = 0.0, followed: float = 1.0
) -> Row:
    asked = point(router, seed=seed, rate_per_s=9.0, weight=weight)
    figures = Figures(ttft_ms, 5 * ttft_ms, 8.0, 900.0, 4000.0, 0.25, 900.0, 0, followed)
    return Row(asked, figures)


def told(**ttft_ms: float) -> str:
    """The goals, with the TTFT of each router; they are a little different for every seed."""
    names = {
        "rr": (ROUND_ROBIN, 0.0),
        "classic": (CLASSIC, 1.0),
        "heavy": (CLASSIC, 4.0),
        "latency": (LATENCY, 0.0),
    }
    rows = [
        row(names[name][0], seed, value + seed, names[name][1])
        for name, value in {
            "rr": 400.0,
            "classic": 110.0,
            "heavy": 100.0,
            "latency": 100.0,
            **ttft_ms,
        }.items()
        for seed in range(3)
    ]
    return gains_report.loads_text(Found(10.0, ()), rows)


def missed(text: str) -> list[str]:
    return [
        line.removeprefix("goal missed  ") for line in text.splitlines() if line.startswith("goal missed")
    ]


def test_latency_is_held_against_the_best_weight() -> None:
    assert missed(told()) == []
    lost = missed(told(latency=104.0))
    assert len(lost) == 2  # mean and p99
    assert all("loses at most 3% to classic 4, its best" in line for line in lost)
    assert missed(told(latency=102.0)) == []


def test_the_peer_is_held_against_on_both_figures_and_missing_rows_are_said() -> None:
    peers = [
        PeerRow("Dynamo, KV router", 1.0, Figures(284.0, 1711.0, 8.0, 2700.0, 8800.0, 0.2)),
        PeerRow("kvolt, latency", 1.0, Figures(250.0, 1720.0, 8.0, 2600.0, 8700.0, 0.25)),
        PeerRow("Dynamo, KV router", 4.0, None, "it did not start"),
        PeerRow("kvolt, latency", 4.0, Figures(250.0, 1600.0, 8.0, 2600.0, 8700.0, 0.25)),
    ]
    text = gains_report.peer_text(peers)
    (line,) = missed(text)
    assert line == "at 1 x below the peer's KV router on TTFT mean and p99: 0.880 and 1.005 of it"
    assert "missing: Dynamo, KV router at 4 x: it did not start" in text


def test_a_part_replaces_itself_in_the_results_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(name: str) -> Callable[..., tuple[str, dict[str, object]]]:
        return lambda plan, options: (f"{name} with {plan.num_seeds} seeds", {"rows": []})

    monkeypatch.setattr(gains, "_RESULTS", tmp_path / "gains")
    monkeypatch.setattr(gains, "PARTS", {name: part(name) for name in ("peer", "cases", "loads")})

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["gains", *arguments])
        gains.main()
        return (tmp_path / "gains.txt").read_text()

    assert "cases with 20 seeds" in run()
    text = run("--only", "cases", "--seeds", "4")
    assert "cases with 4 seeds" in text
    assert "loads with 20 seeds" in text
    assert [line.partition(":")[0] for line in text.splitlines() if ": python -m" in line] == [
        "peer",
        "cases",
        "loads",
    ]
    assert "cases --seeds 4" in text
    run("--smoke")
    assert (tmp_path / "gains.txt").read_text() == text
