"""Several HTTP processes that answer as one: metrics of all, thresholds at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from tests.unit.engines.lab import NAMESPACE, Lab, until

from kvolt.frontend.admission import Admission, LatestLoads
from kvolt.frontend.openai_api.responses import BusyThreshold
from kvolt.frontend.siblings import (
    ReplicatedThresholds,
    SiblingGroup,
    Siblings,
    VersionedThreshold,
    sibling_endpoint,
)
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual

NUM_PROCESSES = 3


@dataclass(slots=True)
class Process:
    runtime: Runtime
    admission: Admission
    siblings: Siblings
    served: Counter

    def blocks(self, model: str = "m") -> float | None:
        return self.admission.threshold(model).active_decode_blocks_threshold

    async def metrics(self) -> list[str]:
        body, _ = await self.siblings.metrics()
        return [
            line for line in body.decode().splitlines() if not line.startswith("#") and "_created" not in line
        ]


async def start(lab: Lab, slot: int, name: str | None = None) -> Process:
    runtime = await lab.runtime(name or f"p{slot}")
    registry = CollectorRegistry()
    served = Counter("kvolt_served", "", registry=registry)
    Gauge("kvolt_memory", "", registry=registry).set(slot)
    admission = Admission(LatestLoads(), 10)
    endpoint = sibling_endpoint(NAMESPACE, "abc")
    siblings = Siblings(runtime, endpoint, SiblingGroup(slot, NUM_PROCESSES), admission, registry)
    await siblings.start()
    lab._closing.append(siblings.close)
    return Process(runtime, admission, siblings, served)


async def start_all(lab: Lab) -> list[Process]:
    processes = [await start(lab, slot) for slot in range(NUM_PROCESSES)]
    await asyncio.sleep(1)
    return processes


def blocks(value: float, model: str = "m") -> BusyThreshold:
    return BusyThreshold(model=model, active_decode_blocks_threshold=value)


def test_any_of_them_answers_for_all() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            processes = await start_all(lab)
            for number, process in enumerate(processes):
                process.served.inc(10**number)
            answers = [await process.metrics() for process in processes]
            assert answers[0] == answers[1] == answers[2]
            assert answers[0] == [
                "kvolt_served_total 111.0",
                'kvolt_memory{process="p0"} 0.0',
                'kvolt_memory{process="p1"} 1.0',
                'kvolt_memory{process="p2"} 2.0',
                'kvolt_frontend_processes{response="received"} 3.0',
                'kvolt_frontend_processes{response="missing"} 0.0',
            ]

    run_virtual(scenario)


@pytest.mark.parametrize("fault", ["crash", "silence"])
def test_one_that_does_not_answer_is_left_out_in_time(fault: str) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            processes = await start_all(lab)
            for process in processes:
                process.served.inc()
            if fault == "crash":
                lab.network.crash("p1", silent=False)
            else:
                lab.network.pause("p1")
            begun = asyncio.get_running_loop().time()
            answer = await processes[0].metrics()
            assert asyncio.get_running_loop().time() - begun < 1.1
            assert "kvolt_served_total 2.0" in answer
            assert 'kvolt_frontend_processes{response="missing"} 1.0' in answer
            assert not any("p1" in line for line in answer)

    run_virtual(scenario)


def test_a_threshold_is_everywhere_when_the_client_has_its_answer() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            processes = await start_all(lab)
            told = await processes[1].siblings.set_threshold(blocks(0.5))
            assert told.active_decode_blocks_threshold == 0.5
            assert [process.blocks() for process in processes] == [0.5] * 3
            tokens = BusyThreshold(model="m", active_prefill_tokens_threshold=100)
            told = await processes[2].siblings.set_threshold(tokens)  # what it leaves out stays
            assert told.active_decode_blocks_threshold == 0.5
            assert [process.blocks() for process in processes] == [0.5] * 3
            await asyncio.gather(
                processes[0].siblings.set_threshold(blocks(0.1)),
                processes[1].siblings.set_threshold(blocks(0.2)),
            )
            assert len({process.blocks() for process in processes}) == 1  # either, but one

    run_virtual(scenario)


def test_one_that_starts_again_knows_them_before_it_serves() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            processes = await start_all(lab)
            await processes[0].siblings.set_threshold(blocks(0.5))
            await processes[0].siblings.set_threshold(blocks(0.7, "other"))
            await processes[1].runtime.abort()
            again = await start(lab, 1, "p1-again")
            assert (again.blocks(), again.blocks("other")) == (0.5, 0.7)
            await asyncio.sleep(1)
            await again.siblings.set_threshold(blocks(0.6))
            assert [one.blocks() for one in (processes[0], again, processes[2])] == [0.6] * 3

    run_virtual(scenario)


def test_one_that_was_out_of_reach_catches_up() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            processes = await start_all(lab)
            await processes[0].siblings.set_threshold(blocks(0.5))
            lab.network.partition("p0", "p2")
            lab.network.partition("p1", "p2")
            await processes[0].siblings.set_threshold(blocks(0.6))
            assert [process.blocks() for process in processes] == [0.6, 0.6, 0.5]
            await asyncio.sleep(5)
            lab.network.heal("p0", "p2")
            lab.network.heal("p1", "p2")
            await until(lambda: processes[2].blocks() == 0.6)

    run_virtual(scenario)


def test_another_group_is_none_of_ours() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            process = await start(lab, 0)
            runtime = await lab.runtime("stranger")
            other = Siblings(
                runtime,
                sibling_endpoint(NAMESPACE, "xyz"),
                SiblingGroup(0, 1),
                Admission(LatestLoads(), 1),
                CollectorRegistry(),
            )
            await other.start()
            lab._closing.append(other.close)
            await asyncio.sleep(1)
            assert 'kvolt_frontend_processes{response="received"} 1.0' in await process.metrics()

    run_virtual(scenario)


def test_books_end_up_equal_whatever_the_order_of_news() -> None:
    news = [
        VersionedThreshold(version, slot, blocks(version + slot / 10))
        for version in (1, 2)
        for slot in (0, 1)
    ]
    results = set()
    for order in (news, news[::-1], [*news[2:], *news[:2], *news]):
        admission = Admission(LatestLoads(), 1)
        book = ReplicatedThresholds(admission, 5)
        for stamped in order:
            book.merge([stamped])
        results.add(admission.threshold("m").active_decode_blocks_threshold)
        book.set(blocks(0.9))
        assert book.all().known == [VersionedThreshold(3, 5, blocks(0.9))]
    assert results == {2.1}


def test_what_a_book_holds_is_bounded() -> None:
    book = ReplicatedThresholds(Admission(LatestLoads(), 1), 0)
    book.merge([VersionedThreshold(1, 1, blocks(0.5, f"m{number}")) for number in range(5000)])
    assert len(book.all().known) == 4096
