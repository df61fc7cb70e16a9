"""Who is let in: the bound on requests, the load of workers, thresholds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker
from tests.unit.frontend.serving import served

from kvolt.core.endpoints import LOAD_TOPIC, EndpointAddress, Instance
from kvolt.core.errors import Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.load import LoadReport, StepStats, WorkerLoad
from kvolt.frontend import admission
from kvolt.frontend.admission import Admission, LatestLoads, is_busy
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


@contextmanager
def admit(door: Admission) -> Iterator[None]:
    leave = door.acquire()
    try:
        yield
    finally:
        leave()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def instance(name: str) -> Instance:
    return Instance(id=InstanceId(name), endpoint=EndpointAddress("n", "c", "e"), address="host:1")


def load(used: int = 0, prefilling: int = 0) -> WorkerLoad:
    step = StepStats(prefill_tokens=prefilling)
    return WorkerLoad(running=1, kv_used_blocks=used, kv_total_blocks=100, step=step)


def report(name: str, used: int = 0, prefilling: int = 0) -> LoadReport:
    return LoadReport(InstanceId(name), load(used, prefilling))


def test_the_bound_on_requests_holds_and_is_given_back() -> None:
    door = Admission(LatestLoads(), 2)
    with admit(door):
        with admit(door):
            with pytest.raises(Overloaded) as caught, admit(door):
                pytest.fail("one too many")
            assert caught.value.fields == {
                "queue": "requests",
                "limit": 2,
                "retry_after_s": 1,
                "gpu_work": "none",
            }
            assert door.num_running == 2
        with pytest.raises(ValueError, match="oops"), admit(door):
            raise ValueError("oops")
        assert door.num_running == 1
    assert door.num_running == 0


@pytest.mark.parametrize(
    ("threshold", "state", "busy"),
    [
        ({}, load(100, 10**6), False),
        ({"active_decode_blocks_threshold": 0.5}, load(50), False),
        ({"active_decode_blocks_threshold": 0.5}, load(51), True),
        ({"active_decode_blocks_threshold": 0.0}, load(0), False),
        ({"active_decode_blocks_threshold": 0.0}, load(1), True),
        ({"active_decode_blocks_threshold": 0.5}, WorkerLoad(running=1, kv_used_blocks=5), False),
        ({"active_prefill_tokens_threshold": 10}, load(0, 10), False),
        ({"active_prefill_tokens_threshold": 10}, load(0, 11), True),
        ({"active_prefill_tokens_threshold": 10}, WorkerLoad(waiting=1), False),
        ({"active_prefill_tokens_threshold": 10}, replace(load(0, 11), running=0, waiting=1), True),
        ({"active_prefill_tokens_threshold": 10}, replace(load(0, 11), running=0), False),
        ({"active_prefill_tokens_threshold_frac": 0.5}, load(0, 500), False),
        ({"active_prefill_tokens_threshold_frac": 0.5}, load(0, 501), True),
        ({"active_decode_blocks_threshold": 0.5, "active_prefill_tokens_threshold": 10}, load(0, 11), True),
    ],
    ids=str,
)
def test_when_a_worker_is_busy(threshold: dict[str, float], state: WorkerLoad, busy: bool) -> None:
    assert is_busy(state, msgspec.convert({"model": "m", **threshold}, BusyThreshold), 1000) is busy


def test_a_request_is_refused_only_when_all_workers_are_busy() -> None:
    loads = LatestLoads()
    door = Admission(loads, 10)
    workers = [instance("a"), instance("b")]
    loads.update(report("a", 90))
    loads.update(report("b", 90))
    door.check("m", workers, 1000)  # no threshold
    door.set_threshold(BusyThreshold(model="m", active_decode_blocks_threshold=0.5))
    with pytest.raises(Overloaded) as caught:
        door.check("m", workers, 1000)
    assert caught.value.fields["queue"] == "workers"
    assert "2 workers" in caught.value.message
    door.check("another", workers, 1000)
    door.check("m", [], 1000)  # that is another's answer
    door.check("m", [*workers, instance("unheard-of")], 1000)
    loads.update(report("b", 10))
    door.check("m", workers, 1000)


def test_a_report_of_another_process_makes_no_worker_busy() -> None:
    loads, own = LatestLoads(), msgspec.structs.replace(instance("a"), identity="kvolt://worker/a")
    door = Admission(loads, 10)
    door.set_threshold(BusyThreshold(model="m", active_decode_blocks_threshold=0.5))
    loads.update(report("a", 90), "kvolt://worker/rogue")
    door.check("m", [own], 1000)
    loads.update(report("a", 90), own.identity)
    with pytest.raises(Overloaded):
        door.check("m", [own], 1000)


def test_what_is_left_out_of_a_threshold_stays() -> None:
    door = Admission(LatestLoads(), 10)
    assert door.threshold("m") == BusyThreshold(model="m")
    door.set_threshold(BusyThreshold(model="m", active_decode_blocks_threshold=0.5))
    both = door.set_threshold(BusyThreshold(model="m", active_prefill_tokens_threshold=7))
    assert both == BusyThreshold(
        model="m", active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=7
    )
    assert door.threshold("m") == both
    assert door.threshold("another").active_decode_blocks_threshold is None


def test_the_memory_for_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_WORKERS", 3)
    loads = LatestLoads()
    for name in ("a", "b", "c"):
        loads.update(report(name))
    loads.update(report("a", 5))  # heard of again, so it is not the longest silent
    loads.update(report("d"))
    assert [loads.get(instance(name)) is not None for name in "abcd"] == [True, False, True, True]
    assert loads.get(instance("a")) == load(5)


def test_a_process_that_invents_workers_displaces_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MAX_WORKERS", 4)
    loads, own = LatestLoads(), msgspec.structs.replace(instance("a"), identity="kvolt://worker/a")
    loads.update(report("a"), own.identity)
    for number in range(100):
        loads.update(report(f"invented-{number}"), "kvolt://worker/rogue")
    assert loads.get(own) is not None
    assert sum(map(len, loads._loads.values())) == loads._num_loads == 4
    with pytest.raises(msgspec.ValidationError):
        admission._decode_report(msgspec.msgpack.encode(report("i" * 1000)))


def test_loads_come_over_the_event_plane_and_garbage_is_skipped() -> None:
    async def scenario() -> None:
        bus = MemBus()
        mine, theirs = MemEvents(bus, "mine"), MemEvents(bus, "theirs")
        await mine.start()
        await theirs.start()
        loads = LatestLoads()
        task_group = TaskGroup("test")
        task_group.start(loads.subscribe(mine), "follow")
        await asyncio.sleep(0.1)
        for payload in (b"", b"\xff\xff", msgspec.msgpack.encode({"x": 1})):
            theirs.publish(LOAD_TOPIC, payload)
        theirs.publish(LOAD_TOPIC, msgspec.msgpack.encode(report("a", 9)))
        await asyncio.sleep(0.1)
        assert loads.get(instance("a")) == load(9)
        assert len(task_group) == 1
        await task_group.close()
        await mine.close()
        await theirs.close()

    run_virtual(scenario)


def test_a_worker_that_has_done_its_work_is_asked_again() -> None:
    """Its last report is of a step that prefilled a lot; none follows while it is idle."""

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        threshold = {"model": MODEL, "active_prefill_tokens_threshold": 10}
        assert (await edge.ask("/busy_threshold", threshold)).status == 200
        for _ in range(3):
            assert (await edge.chat(max_tokens=1)).status == 200
            await asyncio.sleep(1)

    served(body)
