"""The step load, cut to seconds: a worker that is slower than it says holds nobody up who has not begun there."""

from __future__ import annotations

from benchmarks.router.step_load import WAYS, Jump, records, solve, text

JUMP = Jump(base_per_s=10.0, peak_per_s=60.0, from_s=1.0, to_s=5.0, end_s=6.0)


def test_what_waits_at_a_slow_worker_is_taken_back() -> None:
    stays, goes = (solve("one slow", "classic", way, JUMP, 1) for way in ("at once", "late and taken back"))
    assert stays.figures.num_moves == 0
    assert goes.figures.num_moves > 0
    assert stays.figures.num_failed == goes.figures.num_failed == 0
    assert goes.figures.ttft_p99_ms < 0.8 * stays.figures.ttft_p99_ms
    rows = [stays if way == "at once" else goes for way in WAYS]
    report = text(
        [
            row.__class__(row.cluster, row.router, way, 1, row.figures)
            for way, row in zip(WAYS, rows, strict=True)
        ]
    )
    assert len(report.splitlines()) == 2 + len(WAYS)
    assert "1.00x" in report


def test_load_jumps_and_comes_back() -> None:
    times_s = [record.timestamp / 1e3 for record in records(JUMP, 3)]
    during = sum(JUMP.from_s <= at < JUMP.to_s for at in times_s)
    assert times_s == sorted(times_s)
    assert 190 < during < 290
    assert len(times_s) - during < 40
    assert list(records(JUMP, 3)) == list(records(JUMP, 3))
