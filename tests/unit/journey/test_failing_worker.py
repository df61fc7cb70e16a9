"""Workers that fail, as journeys and routers see them: requests go elsewhere, and the worker is tried again later."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from tests.unit.engines.lab import LIMITS, MODEL, Lab, make_request, sim, until
from tests.unit.journey.stage import Inbox
from tests.unit.worker.test_roles import Air, start

from kvolt.core.errors import EngineFailed, Overloaded
from kvolt.core.request import Request, Role
from kvolt.frontend.model import ModelOptions
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.router.breaker import MAX_BACKOFF_S, Outcome
from kvolt.router.metrics import breaker_families, describe_breakers
from kvolt.router.port import Router, RouterContext
from kvolt.router.registry import ROUTERS
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


class Cluster:
    """Three workers, of which the first can be made to refuse whatever it gets."""

    def __init__(self, journey_context: JourneyContext, router: Router, first: Any) -> None:
        self._journey_context = journey_context
        self._first = first
        self._submit = first.engine.submit
        self.router = router
        self.asked: Counter[str] = Counter()
        self.num_refused = 0

    def refuse(self, error: Exception | None) -> None:
        def submit(request: Request) -> None:
            self.num_refused += 1
            assert error is not None
            raise error

        self._first.engine.submit = self._submit if error is None else submit

    async def leave(self) -> None:
        """The first worker is gone, and known to be."""
        await self._first.runtime.close()
        await until(lambda: len(self._journey_context.client.instances()) == 2)

    async def ask(self, seconds: float, cancel_after: int | None = None) -> None:
        """Ten requests a second, which are all answered."""
        self.asked.clear()
        self.num_refused = 0
        for _ in range(int(10 * seconds)):
            inbox = Inbox()
            journey = Journey(self._journey_context, make_request("r"), inbox, LIMITS)
            await journey.start()
            if cancel_after is None:
                await until(lambda inbox=inbox: bool(inbox.ends))
                assert inbox.ends == [None]
            else:
                await until(lambda inbox=inbox: inbox.num_tokens >= cancel_after)
                journey.cancel()
            assert journey.decision is not None
            self.asked[journey.decision.instance.process] += 1
            await asyncio.sleep(0.1)


def clustered(body: Any, router: str) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim()) for number in range(3)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            chosen = ROUTERS[router](RouterContext(client, await lab.runtime("f"), 16))
            task_group = TaskGroup("requests")
            try:
                await body(Cluster(JourneyContext(chosen, client, task_group), chosen, workers[0]))
            finally:
                await task_group.close()
                await chosen.close()

    run_virtual(scenario)


@pytest.mark.parametrize("router", ["latency", "classic", "round-robin", "least-loaded", "power-of-two"])
@pytest.mark.parametrize("cancel_after", [None, 2])
def test_a_worker_that_recovers_gets_its_share_again(router: str, cancel_after: int | None) -> None:
    """Also where clients leave before the end: a worker that had begun to answer works."""

    async def body(cluster: Cluster) -> None:
        cluster.refuse(EngineFailed("a kernel could not be launched"))
        await cluster.ask(10.0)
        assert 3 <= cluster.num_refused <= 8
        assert [each["state"] for each in describe_breakers([cluster.router])] in (["open"], ["half_open"])
        cluster.refuse(None)
        await cluster.ask(MAX_BACKOFF_S + 1.0, cancel_after)
        assert describe_breakers([cluster.router]) == []
        await cluster.ask(10.0)
        assert cluster.asked["w0"] > 15

    clustered(body, router)


@pytest.mark.parametrize("router", ["latency", "round-robin"])
def test_a_worker_that_says_it_is_full_has_not_failed(router: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.refuse(Overloaded("full"))
        await cluster.ask(5.0)
        assert cluster.num_refused > 8
        assert describe_breakers([cluster.router]) == []

    clustered(body, router)


@pytest.mark.parametrize("router", ["latency", "classic", "round-robin"])
def test_prompts_are_computed_by_the_decode_worker_while_the_only_prefill_worker_fails(router: str) -> None:
    """But for the probes, by which it is used again once it works."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefill, _ = await start(lab, air, Role.PREFILL)
            await start(lab, air, Role.DECODE)
            modes = ModelOptions(prefill=PrefillModeRules(is_predicted=False))
            edge = await lab.frontend(router=router, model_options=modes)
            await edge.ready()
            await until(lambda: bool((t := edge.models.get(MODEL).get_prefill_target()) and t.candidates()))
            num_asked = 0
            compute = prefill.engine.prefill

            async def ask(count: int, is_failing: bool) -> None:
                nonlocal num_asked
                num_asked = 0

                def prefill_prompt(*arguments: Any, **named: Any) -> Any:
                    nonlocal num_asked
                    num_asked += 1
                    if is_failing:
                        raise EngineFailed("a kernel could not be launched")
                    return compute(*arguments, **named)

                prefill.engine.prefill = prefill_prompt
                for number in range(count):
                    answer = await edge.complete(prompt=f"{count} {number} " + "water " * 30, max_tokens=3)
                    assert answer.status == 200
                    await asyncio.sleep(0.1)

            await ask(100, is_failing=True)
            assert 4 <= num_asked <= 8, "three that open its breaker, then one probe each after 1, 2 and 4 s"
            await asyncio.sleep(MAX_BACKOFF_S)
            await ask(20, is_failing=False)
            assert num_asked == 20

    run_virtual(scenario)


def test_a_worker_that_is_gone_leaves_no_breaker_behind() -> None:
    async def body(cluster: Cluster) -> None:
        decisions = [await cluster.router.route(make_request(f"r{number}")) for number in range(30)]
        await cluster.leave()
        for decision in decisions:
            is_first = decision.instance.process == "w0"
            cluster.router.release(decision, None, Outcome.FAILED if is_first else Outcome.ANSWERED)
        assert breaker_families_of(cluster.router) == set()

    clustered(body, "round-robin")


def breaker_families_of(router: Router) -> set[str]:
    """Workers that have series."""
    families = breaker_families([("e", router)])
    return {
        each.labels["worker_id"]
        for family in families
        for each in family.samples
        if "worker_id" in each.labels
    }
