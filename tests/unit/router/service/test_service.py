"""The router process: one rotation for several frontends, local routing without it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.engines.adapter_lab import WithAdapters
from tests.unit.engines.lab import NAMESPACE, Lab, RunningWorker, make_request, until

from kvolt.core.delta import Usage
from kvolt.core.errors import ConfigError, KvoltError, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.port import Decision
from kvolt.router.registry import ROUTERS
from kvolt.router.service.client import RemoteRouter
from kvolt.router.service.link import RouterLink
from kvolt.router.service.messages import RouteRequest, router_endpoint
from kvolt.router.service.metrics import LinkCollector, RouterCollector
from kvolt.router.service.service import RouterService
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual


@dataclass(slots=True)
class Edge:
    """A frontend's half: the link to the router, and its own view of the workers."""

    runtime: Runtime
    client: EndpointClient
    link: RouterLink
    router: RemoteRouter

    async def turns(self, number: int) -> list[str]:
        return [(await self.router.route(make_request())).instance.id for _ in range(number)]


async def start_router(lab: Lab, name: str = "router") -> tuple[Runtime, RouterService]:
    runtime = await lab.runtime(name)
    service = RouterService(runtime, NAMESPACE)
    await service.start()
    return runtime, service


async def start_edge(lab: Lab, name: str, workers: list[RunningWorker], with_router: bool = True) -> Edge:
    runtime = await lab.runtime(name)
    routers = await runtime.client(router_endpoint(NAMESPACE))
    client = await runtime.client(workers[0].endpoint)
    link = RouterLink(runtime, routers)
    lab._closing.append(link.close)
    await until(lambda: len(client.candidates()) == len(workers))
    if with_router:
        await until(lambda: link.present)
    return Edge(runtime, client, link, RemoteRouter(link, client, RoundRobinRouter(client)))


def pinned(instance: str) -> Request:
    return replace(make_request(), routing=RoutingHints(pins={Role.AGGREGATED: InstanceId(instance)}))


def exposed(collector: LinkCollector | RouterCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_two_frontends_take_one_turn_over_four_workers() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(4)]
            _, service = await start_router(lab)
            edges = [await start_edge(lab, f"edge-{i}", workers) for i in range(2)]
            # Each alone would begin with the same worker, and go round by itself.
            first, second = await asyncio.gather(edges[0].turns(30), edges[1].turns(70))
            assert list(Counter(first + second).values()) == [25] * 4
            assert [edge.link.stats.num_answered for edge in edges] == [30, 70]
            assert not any(edge.link.stats.fallbacks for edge in edges)
            exposed_text = exposed(RouterCollector(service))
            assert f'kvolt_router_decisions_total{{endpoint="{workers[0].endpoint}"}} 100.0' in exposed_text

    run_virtual(scenario)


def test_without_a_router_process_it_routes_locally_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvolt.router.service.link")

    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            edge = await start_edge(lab, "edge", workers, with_router=False)
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            assert list(Counter(await edge.turns(10)).values()) == [5, 5]
            assert loop.time() == started_at, "a request waited for a router that is not there"
            assert len(caplog.messages) == 1
            assert "routing locally" in caplog.messages[0]
            exposed_text = exposed(LinkCollector(edge.link))
            assert 'kvolt_router_fallbacks_total{reason="absent"} 10.0' in exposed_text
            assert "kvolt_router_present 0.0" in exposed_text

            runtime, _ = await start_router(lab)
            await until(lambda: edge.link.present)
            assert list(Counter(await edge.turns(10)).values()) == [5, 5]
            assert edge.link.stats.num_answered == 10
            assert caplog.messages[1:] == ["router process responds again"]
            await runtime.abort()
            await edge.turns(10)
            assert len(caplog.messages) == 3
            assert edge.link.stats.num_answered == 10

    run_virtual(scenario)


def test_a_router_lost_with_questions_open_loses_no_request() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            runtime, _ = await start_router(lab)
            edge = await start_edge(lab, "edge", workers)
            await edge.turns(1)

            routed = asyncio.gather(*(edge.router.route(make_request(f"r{i}")) for i in range(50)))
            await asyncio.sleep(0.0003)  # the questions have left and are not there yet
            lab.network.crash("router", silent=False)
            assert len(await routed) == 50
            assert edge.link.stats.fallbacks["worker_lost"] == 50
            await runtime.abort()

    run_virtual(scenario)


def test_a_silent_router_costs_one_deadline_and_not_one_each() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            await start_router(lab)
            edge = await start_edge(lab, "edge", workers)
            await edge.turns(2)
            lab.network.partition("edge", "router")
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            await edge.turns(20)
            assert loop.time() - started_at == pytest.approx(1.0, abs=0.01)
            assert edge.link.stats.fallbacks == {"deadline_exceeded": 1, "cooldown": 19}
            lab.network.heal("edge", "router")
            await asyncio.sleep(10)
            await edge.turns(2)
            assert edge.link.stats.num_answered == 4

    run_virtual(scenario)


def test_a_worker_that_is_lost_to_us_is_not_used_though_the_router_names_it() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(3)]
            await start_router(lab)
            edge = await start_edge(lab, "edge", workers)
            lost = workers[1].worker._instance
            edge.client._mark_unreachable(lost, KvoltError("lost"))
            lab.network.partition("edge", "w1")
            assert lost not in await edge.turns(12)
            assert edge.link.stats.fallbacks["unusable_instance"] == 4

    run_virtual(scenario)


def test_pins_and_exclusions_are_obeyed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(3)]
            await start_router(lab)
            edge = await start_edge(lab, "edge", workers)
            everyone = frozenset(instance.id for instance in edge.client.candidates())
            for instance in edge.client.candidates():
                assert (await edge.router.route(pinned(instance.id))).instance == instance
                others = everyone - {instance.id}
                assert (await edge.router.route(make_request(), others)).instance == instance
            for impossible in (
                edge.router.route(pinned("nobody")),
                edge.router.route(make_request(), everyone),
            ):
                with pytest.raises(Unavailable):
                    await impossible

    run_virtual(scenario)


def test_the_router_process_respects_adapters() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("sql"), WithAdapters(), WithAdapters()]
            workers = [await lab.worker(f"w{i}", engine) for i, engine in enumerate(engines)]
            _, service = await start_router(lab)
            edge = await start_edge(lab, "edge", workers)
            wanted = replace(make_request(), lora="sql")
            turns = [(await edge.router.route(wanted)).instance.id for _ in range(5)]
            assert turns == [workers[0].worker._instance] * 5
            assert edge.link.stats.num_answered == 5
            assert not edge.link.stats.fallbacks
            assert service._describe()["decisions"] == 5
            with pytest.raises(Unavailable, match="has the adapter 'poet'"):
                await edge.router.route(replace(wanted, lora="poet"))
            assert service.num_refused == 1

    run_virtual(scenario)


class FullRouter:
    """As one that lets requests wait, when too many do."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        raise Overloaded("100 requests wait", queue="router", limit=100)

    async def close(self) -> None: ...

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None: ...

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None: ...


def test_what_the_router_refuses_for_load_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker("w0")]
            runtime = await lab.runtime("router")
            await RouterService(runtime, NAMESPACE, lambda _: FullRouter()).start()
            edge = await start_edge(lab, "edge", workers)
            with pytest.raises(Overloaded) as caught:
                await edge.router.route(make_request())
            assert caught.value.fields["limit"] == 100

    run_virtual(scenario)


def test_all_use_the_first_router_and_the_next_when_it_is_lost() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            routers = [await start_router(lab, f"router-{i}") for i in range(2)]
            edges = [await start_edge(lab, f"edge-{i}", workers) for i in range(2)]
            await asyncio.sleep(1)
            for edge in edges:
                await edge.turns(10)
            decided = [service._describe()["decisions"] for _, service in routers]
            assert sorted(decided) == [0, 20]
            asked = decided.index(20)
            await routers[asked][0].abort()
            for edge in edges:
                await edge.turns(10)
            assert routers[1 - asked][1]._describe()["decisions"] >= 18  # the loss may cost each edge one

    run_virtual(scenario)


@pytest.mark.parametrize("router", ["round-robin", "latency"])
def test_what_is_watched_is_bounded_and_nonsense_is_refused(router: str) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker("w0")]
            runtime = await lab.runtime("router")
            service = RouterService(runtime, NAMESPACE, ROUTERS[router], max_components=3)
            await service.start()
            edge = await start_edge(lab, "edge", workers)
            await edge.turns(1)
            for number in range(5):
                await edge.turns(1)  # the one that is used stays
                question = RouteRequest(f"{NAMESPACE}.other-{number}.generate", make_request())
                answer = await edge.link.route(question)
                assert answer is not None
                assert answer.response.refused is not None
                assert answer.response.refused.code == Unavailable.code
            assert len(service.components) == 3
            assert str(workers[0].endpoint) in service.components
            answer = await edge.link.route(RouteRequest("../..", make_request()))
            assert answer is not None
            assert answer.response.refused is not None
            assert answer.response.refused.code == ConfigError.code
            assert "kvolt_router_refusals_total 6.0" in exposed(RouterCollector(service))
            await service.close()
            assert not service.components

    run_virtual(scenario)
