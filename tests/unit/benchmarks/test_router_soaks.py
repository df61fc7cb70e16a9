"""The soaks, cut to seconds: what they hold the router to, it keeps; and what it would not keep, they say."""

from __future__ import annotations

from benchmarks.router import event_soak, soak
from benchmarks.router.event_soak import Look, Plan
from msgspec.structs import replace

from kvolt.twin.faults import Faults

ROOMY = Plan("roomy", 2400, 6, 256, 8 << 20, True, num_churns=4, num_restarts=2)


def missed(text: str) -> list[str]:
    return [
        line.removeprefix("goal missed  ") for line in text.splitlines() if line.startswith("goal missed")
    ]


def test_after_losses_churn_and_restarts_the_index_has_what_each_worker_holds() -> None:
    run = event_soak.soak(replace(ROOMY, loss=0.05))
    assert run.num_wrong == 0
    assert run.states == {"exact": 6}
    assert run.num_lost > 10
    assert run.stats["num_replays"] > 10
    assert run.stats["num_snapshots"] >= 6 + 4 + 2 * 6
    assert run.num_blocks > 2400 * 2
    assert [line for line in missed(event_soak.report([run])) if "process" not in line] == []


def test_bytes_stay_under_a_cap_that_the_workers_exceed() -> None:
    tight = replace(
        ROOMY, name="tight", num_requests=6000, worker_blocks=2048, cap_bytes=1 << 18, is_roomy=False
    )
    run = event_soak.soak(tight)
    assert run.most_bytes <= tight.cap_bytes
    assert run.states == {"partial": 6}
    assert [line for line in missed(event_soak.report([run])) if "process" not in line] == []


def test_what_grows_or_differs_is_said() -> None:
    run = event_soak.soak(replace(ROOMY, num_requests=240, num_churns=1, num_restarts=1))
    looks = [Look(at, at, 100) for at in range(1, 100)]
    text = event_soak.report([replace(run, looks=looks, num_wrong=2, most_bytes=9 << 20)])
    told = missed(text)
    assert [line.partition(":")[2].partition(":")[0] for line in told] == [
        " bytes never above the cap",
        " index flat",
        " in the end the index has exactly what each worker holds",
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
    worse = replace(runs[1], errors={"unavailable": 3})
    assert any("every request answered: 3 not" in line for line in missed(soak.report(runs[0], worse)))
    colder = replace(runs[1], minutes=[replace(minute, cached_tokens=0) for minute in runs[1].minutes])
    assert any("within 2 points" in line for line in missed(soak.report(runs[0], colder)))
