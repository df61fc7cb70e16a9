"""A twin with faults: events are lost, the router begins anew, workers come and go, and every request is answered."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.twin.test_inside import ENGINE, FACTS

from kvolt.bench.load.sample import Failure, Sample
from kvolt.bench.traces import small_trace
from kvolt.bench.traces.synthetic import RECIPES, make_trace
from kvolt.router.breaker import FIRST_BACKOFF_S, MAX_BACKOFF_S
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import deciding_router
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.testing.virtual.loop import run_virtual
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.faults import Faults, new_bus
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import make_twin_report

SETTINGS = TwinSettings(
    num_workers=3, router="latency", engine=replace(ENGINE, kv_blocks=512, context_length=4096)
)


def ran(faults: Faults, router: str = "latency") -> tuple[TwinRun, list[Sample], list[Router]]:
    """With the routers that decided, each once."""
    settings = replace(SETTINGS, faults=faults, router=router)
    run = TwinRun(settings, new_tally(settings))
    samples: list[Sample] = []
    routers: list[Router] = []

    def on_sample(sample: Sample) -> None:
        samples.append(sample)
        assert run.cluster is not None
        router = run.cluster.journey_context.router
        if not any(router is each for each in routers):
            routers.append(router)

    run.run(small_trace(), on_sample)
    assert run.cluster is None
    return run, samples, routers


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_bus_loses_its_share(share: float) -> None:
    async def scenario() -> int:
        bus = new_bus(Faults(event_loss=share), 1)
        plane = MemEvents(bus, "a")
        await plane.start()
        stream = plane.subscribe("t")
        for _ in range(1000):
            plane.publish("t", b"")
        await plane.close()
        return len([event async for event in stream])

    assert abs(run_virtual(scenario) - (1 - share) * 1000) < 50


def test_without_loss_there_is_nothing_to_draw() -> None:
    assert type(new_bus(Faults(), 1)) is MemBus


def test_lost_events_cost_nothing_but_questions() -> None:
    calm, _, _ = ran(Faults())
    run, samples, routers = ran(Faults(event_loss=0.2))
    (router,) = map(deciding_router, routers)
    assert isinstance(router, EventFedRouter)
    assert router.ingest.stats.num_gaps > 10
    assert all(sample.error is None for sample in samples)
    assert run.tally.cached_tokens == pytest.approx(calm.tally.cached_tokens, rel=0.05)


def test_workers_come_and_go_and_every_request_is_answered() -> None:
    run, samples, _ = ran(Faults(churn_s=10.0))
    assert len(samples) == 300
    assert all(sample.error is None for sample in samples)
    assert run.watch.ended_s is not None
    num_churns = int(run.watch.ended_s / 10.0)
    assert len(run.watch.workers) == 3 + num_churns
    assert sum(worker.num_requests > 0 for worker in run.watch.workers) > 3  # newcomers too
    # There are three at a time, and for a moment one that finishes what it has.
    twin = make_twin_report(FACTS, run).twin
    assert 3 * run.watch.ended_s <= twin.gpu_seconds <= 3 * run.watch.ended_s + 2.0 * num_churns
    assert twin.busy_gpu_seconds <= twin.gpu_seconds
    assert all(worker.busy_share <= 1.0 for worker in twin.workers)


def test_a_router_that_begins_anew_asks_what_is_held() -> None:
    calm, _, _ = ran(Faults())
    run, samples, routers = ran(Faults(router_restart_s=5.0))
    assert len(samples) == 300
    assert all(sample.error is None for sample in samples)
    assert len(routers) > 10
    # It would find next to nothing if it only heard of what is stored from then on.
    assert run.tally.cached_tokens == pytest.approx(calm.tally.cached_tokens, rel=0.1)


def test_trouble_follows_from_the_seed() -> None:
    faults = Faults(event_loss=0.05, churn_s=7.0, router_restart_s=11.0)
    (_, first, _), (_, second, _) = ran(faults), ran(faults)
    assert first == second


def test_a_router_that_knows_nothing_lives_through_it() -> None:
    _, samples, _ = ran(Faults(churn_s=10.0, router_restart_s=7.0), router="round-robin")
    assert all(sample.error is None for sample in samples)


@pytest.mark.parametrize("wrong", [{"event_loss": 1.5}, {"churn_s": 0}, {"router_restart_s": -1}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Faults)


def test_a_slow_worker_does_not_say_so() -> None:
    run, samples, _ = ran(Faults(slow_workers=1, slow_by=8.0), "round-robin")
    even, others, _ = ran(Faults(), "round-robin")
    assert all(each.error is None for each in (*samples, *others))
    busy_s = [worker.busy_s for worker in run.watch.workers]
    told_s = [worker.busy_s for worker in even.watch.workers]
    assert busy_s[0] > 2 * told_s[0]
    assert busy_s[1:] == pytest.approx(told_s[1:], rel=0.2)


@pytest.mark.parametrize(
    "router", ["latency", "classic", "round-robin", "least-loaded", "power-of-two", "random"]
)
def test_a_worker_that_fails_at_once_gets_a_few_probes(router: str) -> None:
    """It looks idle all the time: without a breaker, the routers that look at load send it nearly everything."""
    settings = replace(SETTINGS, num_workers=8, router=router, faults=Faults(failing_workers=1))
    run = TwinRun(settings, new_tally(settings))
    errors: list[Failure | None] = []
    retries: dict[str, int] = {}

    def on_sample(sample: Sample) -> None:
        errors.append(sample.error)
        assert run.cluster is not None
        retries.update(run.cluster.journey_context.stats.retries)

    trace = list(itertools.islice(make_trace(replace(RECIPES["small"], requests=401, rate_per_s=40.0)), 401))
    run.run(trace, on_sample)
    assert errors == [None] * 401
    lasted_s = run.watch.ended_s
    num_probes = math.ceil(math.log2(lasted_s / FIRST_BACKOFF_S + 1)) + lasted_s / MAX_BACKOFF_S
    assert retries.keys() == {"engine_failed"}
    # Those that open the breaker, those that were on their way by then, and one for each end of a back-off.
    assert 3 <= retries["engine_failed"] <= 6 + num_probes
