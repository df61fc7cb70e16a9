"""The soak, cut to seconds: it reports what the router misses."""

from __future__ import annotations

from benchmarks.router import soak
from msgspec.structs import replace

from kvolt.twin.faults import Faults


def missed(text: str) -> list[str]:
    return [
        line.removeprefix("goal missed  ") for line in text.splitlines() if line.startswith("goal missed")
    ]


def test_the_report_of_the_whole_path() -> None:
    calm, troubled = soak.plans(1.0, 5.0, 2, Faults(event_loss=0.01, churn_s=20.0, router_restart_s=15.0))
    runs = soak.solve(calm), soak.solve(troubled)
    assert [sum(minute.num_whole for minute in run.minutes) for run in runs] == [300, 300]
    assert runs[0].num_workers == 2
    assert runs[1].num_workers >= 5
    assert not runs[0].errors
    assert not runs[1].errors
    assert all(look.index_bytes > 0 for run in runs for look in run.looks)
    text = soak.report(*runs)
    assert "1 virtual minutes at 5 requests/s" in text
    larger = [replace(look, index_bytes=at + 1) for at, look in enumerate(runs[1].looks)]
    assert any("index flat" in line for line in missed(soak.report(runs[0], replace(runs[1], looks=larger))))
    worse = replace(runs[1], errors={"unavailable": 3})
    assert any("every request answered: 3 not" in line for line in missed(soak.report(runs[0], worse)))
    colder = replace(runs[1], minutes=[replace(minute, cached_tokens=0) for minute in runs[1].minutes])
    assert any("within 2 points" in line for line in missed(soak.report(runs[0], colder)))
