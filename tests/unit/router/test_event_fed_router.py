"""EventFedRouter: routing follows the blocks that workers hold, whatever events are lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import ARGUMENTS, Lab, make_request, sim, until

from kvolt.core.delta import Delta
from kvolt.core.endpoints import LOAD_TOPIC
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Request
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.router.policy.policy import classic, latency
from kvolt.router.port import RouterContext
from kvolt.router.registry import ROUTERS, find_router
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual

BLOCK = ARGUMENTS.block_size
PRICED = msgspec.structs.replace(ARGUMENTS, latency=LatencyModel(base_s=0.01, prefill_token_s=0.0001))
"""What is cached is worth something."""


def prompt(name: str, tokens: tuple[int, ...]) -> Request:
    hasher = SequenceHasher(BLOCK, request_seed(None, None))
    hasher.extend(list(tokens))
    return msgspec.structs.replace(
        make_request(),
        request_id=RequestId(name),
        token_ids=tokens,
        block_size=BLOCK,
        sequence_hashes=tuple(hasher.sequence),
    )


class Reader:
    """A receiver that waits for the end."""

    steps: StepSink | None = None

    def __init__(self) -> None:
        self.has_started = False
        self.cached_tokens: int | None = None
        self.is_over = False
        self.error: KvoltError | None = None

    def on_item(self, delta: Any) -> None:
        assert isinstance(delta, Delta)
        self.has_started = True
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens

    def on_end(self, error: KvoltError | None) -> None:
        self.is_over, self.error = True, error


class Scene:
    def __init__(self, lab: Lab, router: EventFedRouter, journey_context: JourneyContext) -> None:
        self.lab = lab
        self.router = router
        self.journey_context = journey_context

    async def ask(self, request: Request) -> tuple[str, int | None]:
        """Which worker answered, and how much of the prompt it had."""
        reader = Reader()
        journey = Journey(self.journey_context, request, reader, Deadlines())
        await journey.start()
        await until(lambda: reader.is_over)
        assert reader.error is None
        assert journey.decision is not None
        return journey.decision.instance.process, reader.cached_tokens


@pytest.mark.parametrize("policy", [classic(), latency()], ids=["classic", "latency"])
def test_a_prompt_returns_to_its_worker(policy: Any) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await begun(lab, policy)
            text = tuple(range(1, 6 * BLOCK + 4))
            first, cached = await scene.ask(prompt("a", text))
            assert cached == 0
            for number in range(4):
                again, cached = await scene.ask(prompt(f"b{number}", (*text, 7, 8, number)))
                assert (again, cached) == (first, 6 * BLOCK)
            others = {
                (await scene.ask(prompt(f"c{number}", tuple(range(100 * number, 100 * number + 40)))))[0]
                for number in range(2, 8)
            }
            assert len(others) > 1
            assert scene.router.num_in_flight == 0
            await close()

    run_virtual(scenario)


def test_events_that_were_lost_are_made_up_for() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await begun(lab, latency())
            for publisher in [each.runtime.events.publisher for each in lab._workers]:
                lab.bus.drop_next(publisher, 50)
            text = tuple(range(1, 6 * BLOCK + 4))
            first, _ = await scene.ask(prompt("a", text))
            await until(lambda: scene.router.block_index.num_pairs > 0)
            again, cached = await scene.ask(prompt("b", text))
            assert (again, cached) == (first, 6 * BLOCK)
            await close()

    run_virtual(scenario)


def test_what_workers_report_is_heard_and_nonsense_is_not() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await begun(lab, classic())
            ids = [instance.id for instance in scene.journey_context.client.candidates()]
            teller = await lab.runtime("teller")
            teller.events.publish(LOAD_TOPIC, b"nonsense")
            busy = WorkerLoad(running=50, kv_used_blocks=500)
            for each in ids[:2]:
                teller.events.publish(LOAD_TOPIC, msgspec.msgpack.encode(LoadReport(each, busy)))
            await asyncio.sleep(0.01)
            decision = await scene.router.route(prompt("a", tuple(range(40))))
            assert decision.instance.id == ids[2]
            scene.router.release(decision, None)
            await close()

    run_virtual(scenario)


def test_ones_own_policy_decides_and_changes_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"

    def write(sign: str) -> None:
        path.write_text(f"def cost(request, workers):\n    return {sign}workers.requests\n")

    async def scenario() -> None:
        async with Lab() as lab:
            write("+")
            new_router = find_router(f"{path}:cost")
            scene, close = await begun(
                lab, new_router, RouterSettings(shadow="latency", reload_s=2.0, queue=False)
            )

            async def where(number: int) -> set[str]:
                return {
                    (await scene.router.route(prompt(str(each), (1,)))).instance.id for each in range(number)
                }

            assert len(await where(3)) == 3
            write("-1 * ")
            await asyncio.sleep(3.0)
            last = await where(5)
            assert len(last) == 1
            path.write_text("nonsense(")
            await asyncio.sleep(3.0)
            assert await where(1) == last
            shadow = scene.router.selector.shadow
            assert shadow is not None
            assert shadow.stats.num_decisions == 9
            assert shadow.stats.num_agreed < 9
            await close()

    run_virtual(scenario)


def test_a_router_is_found_by_its_name_or_refused_at_once(tmp_path: Path) -> None:
    assert find_router("latency") is ROUTERS["latency"]
    for name, settings in (
        ("fastest", RouterSettings()),
        (f"{tmp_path}/none.py:cost", RouterSettings()),
        ("latency", RouterSettings(shadow="fastest")),
    ):
        with pytest.raises(ConfigError):
            find_router(name, settings)


async def begun(lab: Lab, policy: Any, settings: RouterSettings | None = None) -> tuple[Scene, Any]:
    workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(3)]
    runtime = await lab.runtime("edge")
    client = await runtime.client(workers[0].endpoint)
    await until(lambda: len(client.candidates()) == 3)
    context = RouterContext(client, runtime, BLOCK, settings or RouterSettings())
    router = EventFedRouter(context, policy) if settings is None else policy(context)
    await until(lambda: router.ingest.num_in_state(FeedState.EXACT) == 3)
    task_group = TaskGroup("journeys")

    async def close() -> None:
        await task_group.close()
        await router.close()

    return Scene(lab, router, JourneyContext(router, client, task_group)), close
