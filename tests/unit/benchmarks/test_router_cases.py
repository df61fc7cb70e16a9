"""The study of uneven requests and workers: its traces, and what its table says of the goals."""

from __future__ import annotations

from benchmarks.router.cases import CASES, ROUTERS, Case, CasePoint, CaseRow, records_of, solve_case, text
from benchmarks.router.gains_runs import Figures


def figures(ms: float) -> Figures:
    return Figures(ms, 2 * ms, 8.0, 10 * ms, 20 * ms, 0.25)


def test_a_seed_is_a_trace_and_a_tenant_is_a_prefix() -> None:
    hot = next(case for case in CASES if case.name == "hot tenant")
    assert records_of(hot, 1, 5.0) == records_of(hot, 1, 5.0) != records_of(hot, 2, 5.0)
    firsts = [record.hash_ids[0] for record in records_of(hot, 1, 20.0)]
    assert 0.4 < firsts.count(0) / len(firsts) < 0.6
    assert len(set(firsts)) == 21


def test_a_case_is_solved_by_each_router() -> None:
    case = Case("small", 640, 20.0)
    for router in ROUTERS:
        row = solve_case(CasePoint(case, router, 0, 3.0, 1.0))
        assert row.figures.num_failed == 0
        assert 0.0 < row.figures.ttft_mean_ms < row.figures.e2e_mean_ms <= row.figures.e2e_p99_ms


def test_the_default_router_is_held_against_the_better_of_the_others() -> None:
    times_ms = {"a": (100.0, 99.0, 150.0), "b": (100.0, 150.0, 90.0)}
    rows = [
        CaseRow(CasePoint(Case(name, 640, 20.0), router, 0, 3.0, 1.0), figures(ms))
        for name, of_case in times_ms.items()
        for router, ms in zip(ROUTERS, of_case, strict=True)
    ]
    told = text(rows)
    assert "goal met     a: latency as good" in told
    assert "goal missed  b: latency as good" in told
    assert "TTFT mean 1.11" in told
