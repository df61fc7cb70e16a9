"""What a router would do with a request, in every term; and who could not take it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import NAMESPACE, Lab, RunningWorker, sim, until
from tests.unit.router.index.test_hybrid import Foreign, engine
from tests.unit.router.test_event_fed_router import BLOCK, PRICED, prompt

from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.explanation import Explanation, explain_route
from kvolt.router.ingest.feed import FeedState
from kvolt.router.port import RoundRobinRouter, Router, RouterContext
from kvolt.router.queue.queue_router import QueueRouter, who_decides
from kvolt.router.registry import find_router
from kvolt.router.service.client import RemoteRouter, RouterLink
from kvolt.router.service.messages import router_endpoint
from kvolt.router.service.service import RouterService
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.testing import run_virtual

TEXT = tuple(range(1, 6 * BLOCK + 4))


async def opened(lab: Lab, workers: list[RunningWorker], **settings: Any) -> Router:
    runtime = await lab.runtime("edge")
    client = await runtime.client(workers[0].endpoint)
    await until(lambda: len(client.candidates()) == len(workers))
    router = find_router("latency")(RouterContext(client, runtime, BLOCK, RouterSettings(**settings)))
    lab._closing.append(router.close)
    return router


def hinted(**hints: Any) -> Request:
    return replace(prompt("a", TEXT), routing=RoutingHints(**hints))


def whys(told: Explanation) -> dict[str, str]:
    return {each.process: each.why for each in told.left_out}


def test_candidates_come_with_their_terms_and_nothing_is_booked() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker("w0", engine(Foreign)), await lab.worker("w1", sim(PRICED))]
            router = await opened(lab, workers)
            inner: Any = who_decides(router)
            await until(lambda: inner.ingest.num_in(FeedState.EXACT) == 1)
            decision = await router.route(prompt("a", TEXT))
            told = explain_route(router, prompt("b", (*TEXT, 7)), "edge")
            assert inner.num_under_way == 1
            assert (told.policy, told.decided_by, told.num_blocks) == ("latency", "edge", 6)
            assert told.prompt_tokens == len(TEXT) + 1
            first, second = told.candidates
            assert first.terms.cost <= second.terms.cost
            assert [each.terms.is_chosen for each in told.candidates] == [True, False]
            at = next(each for each in told.candidates if each.terms.instance == decision.instance.id)
            assert (at.terms.overlap_blocks, at.terms.held_blocks) == (6, 0), "it is on its way there"
            assert at.process == decision.instance.process
            held_by = {each.process: each.held_by for each in told.candidates}
            assert held_by["w0"].startswith("own decisions: it names blocks by 'sha256'")
            assert held_by["w1"] == "events, exact"
            assert told.left_out == ()
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Explanation) == told
            router.free(decision, None)

    run_virtual(scenario)


def test_who_is_left_out_is_told_with_the_reason() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(3)]
            router = await opened(lab, workers, queue=False)
            ids = {each.runtime.options.name: each.worker._instance for each in workers}
            pinned = explain_route(router, hinted(pins={Role.AGGREGATED: ids["w1"]}), "edge")
            assert [each.process for each in pinned.candidates] == ["w1"]
            assert whys(pinned) == dict.fromkeys(("w0", "w2"), f"the request is pinned to {ids['w1']}")
            allowed = explain_route(router, hinted(allowed=(ids["w0"], ids["w1"])), "edge")
            assert whys(allowed) == {"w2": "it is none of those that the request allows"}
            tainted = explain_route(router, hinted(required_taints=("gpu", "big")), "edge")
            assert tainted.candidates == ()
            assert "taints gpu, big" in tainted.problem
            assert whys(tainted)["w0"] == "it does not have the taints gpu, big"
            ranked = explain_route(router, hinted(pinned_dp_rank=4), "edge")
            assert whys(ranked)["w0"] == "it has no data-parallel rank 4"
            adapted = explain_route(router, replace(prompt("a", TEXT), lora="poet"), "edge")
            assert whys(adapted)["w0"] == "it does not have the adapter 'poet'"

            client = router._client  # type: ignore[attr-defined]
            await workers[0].runtime.cordon()
            lab.network.crash("w1", silent=True)
            await until(lambda: len(client.candidates()) == 1)
            told = explain_route(router, prompt("a", TEXT), "edge")
            assert whys(told)["w0"] == "it is cordoned and takes no new requests"
            assert whys(told)["w1"] == "it cannot be reached now"

    run_virtual(scenario)


def test_a_router_that_weighs_nothing_says_what_to_do() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            client = await lab.client(await lab.worker("w0", sim()))
            with pytest.raises(Unsupported, match="weighs nothing") as raised:
                explain_route(RoundRobinRouter(client), prompt("a", TEXT), "edge")
            assert "--router latency" in raised.value.fields["remedy"]

    run_virtual(scenario)


def test_a_router_process_explains_for_its_frontends_and_each_for_itself_without_one() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(2)]
            local = await opened(lab, workers, events=False)
            service = RouterService(await lab.runtime("router"), NAMESPACE, find_router("classic"))
            await service.start()
            runtime = await lab.runtime("frontend")
            link = RouterLink(runtime, await runtime.client(router_endpoint(NAMESPACE)))
            lab._closing.append(link.close)
            await until(lambda: link.present)
            client = await runtime.client(workers[0].endpoint)
            router = RemoteRouter(link, client, local, BLOCK)
            told = await router.explain(prompt("a", TEXT))
            assert (told.policy, told.decided_by, told.num_blocks) == ("classic", "router", 6)
            assert len(told.candidates) == 2
            assert service.num_held == 0
            await service.close()
            await until(lambda: not link.present)
            told = await router.explain(prompt("a", TEXT))
            assert told.policy == "latency"
            assert told.candidates[0].held_by == "own decisions"

    run_virtual(scenario)


def test_how_many_wait_is_told() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            router = await opened(lab, [await lab.worker("w0", sim(PRICED))])
            assert isinstance(router, QueueRouter)
            assert explain_route(router, prompt("a", TEXT), "edge").num_waiting == 0

    run_virtual(scenario)


def test_a_flagged_worker_is_told_of() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            router = await opened(lab, [await lab.worker("w0", sim(PRICED))], queue=False)
            inner: Any = router
            await until(lambda: inner.ingest.num_in(FeedState.EXACT) == 1)
            for _ in range(20):
                decision = await router.route(prompt("a", TEXT))
                router.begun(decision, 6 * BLOCK)  # nobody said so
                router.free(decision, None)
            (told,) = explain_route(router, prompt("a", TEXT), "edge").candidates
            assert told.held_by == "own decisions: its reports are not what its events promise"
            assert inner.holders.trust.flagged == [InstanceId(told.terms.instance)]

    run_virtual(scenario)
