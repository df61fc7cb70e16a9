"""Explanation of a routing decision: candidates with cost terms, and excluded workers."""

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
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.explanation import Explanation, explain_route
from kvolt.router.ingest.feed import FeedState
from kvolt.router.port import Router, RouterContext
from kvolt.router.queue.queue_router import QueueRouter, deciding_router
from kvolt.router.registry import find_router
from kvolt.router.service.client import RemoteRouter
from kvolt.router.service.link import RouterLink
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


def reasons(result: Explanation) -> dict[str, str]:
    return {each.process: each.reason for each in result.excluded_workers}


def test_candidates_with_terms_without_a_reservation() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker("w0", engine(Foreign)), await lab.worker("w1", sim(PRICED))]
            router = await opened(lab, workers)
            inner: Any = deciding_router(router)
            await until(lambda: inner.ingest.num_in_state(FeedState.EXACT) == 1)
            decision = await router.route(prompt("a", TEXT))
            result = explain_route(router, prompt("b", (*TEXT, 7)), "edge")
            assert inner.num_in_flight == 1
            assert (result.policy, result.decided_by, result.num_blocks) == ("latency", "edge", 6)
            assert {each.engine for each in result.candidates} == {"sim"}
            assert result.prompt_tokens == len(TEXT) + 1
            first, second = result.candidates
            assert first.terms.cost <= second.terms.cost
            assert [each.terms.is_chosen for each in result.candidates] == [True, False]
            at = next(each for each in result.candidates if each.terms.instance == decision.instance.id)
            assert (at.terms.overlap_blocks, at.terms.held_blocks) == (6, 0), "it is on its way there"
            assert at.process == decision.instance.process
            index_source = {each.process: each.index_source for each in result.candidates}
            assert index_source["w0"].startswith("own decisions: it hashes blocks by 'sha256'")
            assert index_source["w1"] == "events, exact"
            assert result.excluded_workers == ()
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Explanation) == result
            router.release(decision, None)

    run_virtual(scenario)


def test_excluded_workers_have_a_reason() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(3)]
            router = await opened(lab, workers, queue=False)
            ids = {each.runtime.options.name: each.worker._instance for each in workers}
            pinned = explain_route(router, hinted(pins={Role.AGGREGATED: ids["w1"]}), "edge")
            assert [each.process for each in pinned.candidates] == ["w1"]
            assert reasons(pinned) == dict.fromkeys(("w0", "w2"), f"the request is pinned to {ids['w1']}")
            allowed = explain_route(router, hinted(allowed=(ids["w0"], ids["w1"])), "edge")
            assert reasons(allowed) == {"w2": "it is not among the workers that the request allows"}
            tainted = explain_route(router, hinted(required_taints=("gpu", "big")), "edge")
            assert tainted.candidates == ()
            assert "taints gpu, big" in tainted.problem
            assert reasons(tainted)["w0"] == "it does not have the taints gpu, big"
            ranked = explain_route(router, hinted(pinned_dp_rank=4), "edge")
            assert reasons(ranked)["w0"] == "it has no data-parallel rank 4"
            adapted = explain_route(router, replace(prompt("a", TEXT), lora="poet"), "edge")
            assert reasons(adapted)["w0"] == "it does not have the adapter 'poet'"

            client = router._client  # type: ignore[attr-defined]
            await workers[0].runtime.cordon()
            lab.network.crash("w1", silent=True)
            await until(lambda: len(client.candidates()) == 1)
            result = explain_route(router, prompt("a", TEXT), "edge")
            assert reasons(result)["w0"] == "it is cordoned and accepts no new requests"
            assert reasons(result)["w1"] == "it is not reachable"

    run_virtual(scenario)


def test_a_router_without_costs_names_the_remedy() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            client = await lab.client(await lab.worker("w0", sim()))
            with pytest.raises(Unsupported, match="cost model") as raised:
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
            result = await router.explain(prompt("a", TEXT))
            assert (result.policy, result.decided_by, result.num_blocks) == ("classic", "router", 6)
            assert len(result.candidates) == 2
            assert service.num_held == 0
            await service.close()
            await until(lambda: not link.present)
            result = await router.explain(prompt("a", TEXT))
            assert result.policy == "latency"
            assert result.candidates[0].index_source == "own decisions"

    run_virtual(scenario)


def test_the_number_of_queued_requests_is_shown() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            router = await opened(lab, [await lab.worker("w0", sim(PRICED))])
            assert isinstance(router, QueueRouter)
            assert explain_route(router, prompt("a", TEXT), "edge").num_waiting == 0

    run_virtual(scenario)


def test_a_flagged_worker_is_shown() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            router = await opened(lab, [await lab.worker("w0", sim(PRICED))], queue=False)
            inner: Any = router
            await until(lambda: inner.ingest.num_in_state(FeedState.EXACT) == 1)
            for _ in range(20):
                decision = await router.route(prompt("a", TEXT))
                router.mark_first_token(decision, 6 * BLOCK)  # not registered
                router.release(decision, None)
            (result,) = explain_route(router, prompt("a", TEXT), "edge").candidates
            assert result.index_source == "own decisions: its reports differ from its KV events"
            assert inner.prefix_index.health.flagged == [InstanceId(result.terms.instance)]

    run_virtual(scenario)
