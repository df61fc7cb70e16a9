"""One router for several frontends: a service that decides for all, and the port of those who ask it.

The service watches the components that it is asked about and holds a router for each, so that one rotation
goes over all frontends. It decides and carries nothing: a frontend that cannot ask it decides alone at once,
and asks again by itself when it can.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from kvolt.core.errors import DeadlineExceeded, ErrorInfo, KvoltError, Unavailable, from_info, to_info
from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, StopConditions
from kvolt.router.port import Decision, RoundRobinRouter, Router
from kvolt.runtime.address import EndpointAddress, Instance, InstanceState
from kvolt.runtime.call import Deadlines
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.runtime import Runtime

log = logging.getLogger(__name__)

MAX_COMPONENTS = 1024
"""Watched at once; the one not asked about for longest makes room."""

_ASK_S = 1.0
_REST_S = 1.0
"""After a router that did not answer in time: a silent one must not cost every request its deadline."""
_SYNC_S = 0.5
_MAX_ASKS = 2

_NO_TOKENS = StopConditions(max_tokens=1)


def router_endpoint(namespace: str) -> EndpointAddress:
    """Where the router of a namespace is asked."""
    return EndpointAddress(namespace, "router", "route")


class RouteQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which instance of an endpoint is to get this request?"""

    endpoint: str
    request: Request
    """Without tokens and hashes: whoever decides by content will have to be sent them."""
    excluded: tuple[InstanceId, ...] = ()


class RouteAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Decision by name, or the router's own refusal.

    A refusal is an answer and no failed call, so that it cannot be mistaken for a router that is stopping.
    """

    instance: InstanceId | None = None
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    refused: ErrorInfo | None = None


_decode_answer = msgspec.msgpack.Decoder(RouteAnswer).decode


# --- The router process -------------------------------------------------------------------------------


@dataclass(slots=True)
class Component:
    """What is asked about: its instances, and who decides among them."""

    client: EndpointClient
    router: Router
    num_decisions: int = 0


class RouterService:
    """Answers RouteQuestions. `start` registers it; `close` ends its watching."""

    def __init__(
        self,
        runtime: Runtime,
        namespace: str,
        new_router: Callable[[EndpointClient], Router] = RoundRobinRouter,
        max_components: int = MAX_COMPONENTS,
    ) -> None:
        self._runtime = runtime
        self._endpoint = router_endpoint(namespace)
        self._new_router = new_router
        self._max_components = max_components
        self._opening = asyncio.Lock()
        self.components: dict[str, Component] = {}
        """By endpoint, the one not asked about for longest first."""
        self.num_refused = 0

    async def start(self) -> Instance:
        self._runtime.add_details("router", self._describe)
        return await self._runtime.serve(self._endpoint, self._serve, RouteQuestion)

    async def close(self) -> None:
        await self._runtime.withdraw(self._endpoint)
        while self.components:
            await self.components.popitem()[1].client.close()

    def _describe(self) -> dict[str, int]:
        return {
            "components": len(self.components),
            "decisions": sum(component.num_decisions for component in self.components.values()),
        }

    async def _serve(self, question: RouteQuestion) -> AsyncIterator[RouteAnswer]:
        try:
            component = await self._component(question.endpoint)
            decision = await component.router.route(question.request, frozenset(question.excluded))
        except KvoltError as error:
            self.num_refused += 1
            yield RouteAnswer(refused=to_info(error))
            return
        component.num_decisions += 1
        # Nobody tells us how it ends: over here nothing stays booked.
        component.router.free(decision)
        yield RouteAnswer(
            decision.instance.id, decision.overlap_blocks, decision.predicted_ms, decision.kv_sources
        )

    async def _component(self, endpoint: str) -> Component:
        component = self.components.pop(endpoint, None)
        if component is None:
            component = await self._open(endpoint)
        else:
            self.components[endpoint] = component
        await component.client.wait_synced(_SYNC_S)
        return component

    async def _open(self, endpoint: str) -> Component:
        address = EndpointAddress.parse(endpoint)
        async with self._opening:
            if endpoint in self.components:
                return self.components[endpoint]
            while len(self.components) >= self._max_components:
                oldest = next(iter(self.components))
                await self.components.pop(oldest).client.close()
            client = await self._runtime.client(address)
            component = self.components[endpoint] = Component(client, self._new_router(client))
            return component


# --- Those who ask it ---------------------------------------------------------------------------------


@dataclass(slots=True)
class LinkStats:
    """How asking went, for metrics."""

    num_answered: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Requests routed without the router, by reason."""


class RouterLink:
    """A process's way to the router process, shared by all its models."""

    def __init__(self, client: EndpointClient, ask_s: float = _ASK_S) -> None:
        self._client = client
        self._deadlines = Deadlines(connect_s=ask_s, first_s=ask_s, between_s=ask_s, total_s=ask_s)
        self._loop = asyncio.get_running_loop()
        self._resting_until = 0.0
        self._answers = True
        self.stats = LinkStats()

    @property
    def present(self) -> bool:
        """Whether a router would be asked now."""
        return bool(self._client.candidates()) and self._loop.time() >= self._resting_until

    async def ask(self, question: RouteQuestion) -> RouteAnswer | None:
        """None when there is no router to be had now; says so once, and once when there is one again."""
        routers = self._client.candidates()
        if not routers:
            self._alone("absent", "none can be reached")
            return None
        if self._loop.time() < self._resting_until:
            self._alone("resting", "it did not answer in time")
            return None
        try:
            # The first by id, so that all frontends of a namespace ask the same one; others stand by.
            answer = await self._call(question, routers[0])
        except KvoltError as error:
            if isinstance(error, DeadlineExceeded):
                self._resting_until = self._loop.time() + _REST_S
            self._alone(error.code, error.message)
            return None
        if not self._answers:
            self._answers = True
            log.info("the router answers again")
        self.stats.num_answered += 1
        return answer

    async def _call(self, question: RouteQuestion, router: Instance) -> RouteAnswer:
        async with await self._client.stream(question, router, self._deadlines, _decode_answer) as stream:
            answer: RouteAnswer | None = await anext(stream, None)
        if answer is None:
            raise KvoltError("it ended without an answer")
        return answer

    def _alone(self, reason: str, why: str) -> None:
        self.stats.fallbacks[reason] += 1
        if self._answers:
            self._answers = False
            log.warning("no router (%s): choosing workers by our own round-robin until there is one", why)


class RemoteRouter:
    """The Router port for one component, decided by the router process; by ourselves while there is none."""

    def __init__(self, link: RouterLink, client: EndpointClient) -> None:
        self._link = link
        self._client = client
        self._endpoint = str(client.endpoint)
        self._local = RoundRobinRouter(client)  # which books nothing, and neither does who is asked

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        asked = _without_content(request)
        left_out = excluded
        for _ in range(_MAX_ASKS):
            answer = await self._link.ask(RouteQuestion(self._endpoint, asked, tuple(sorted(left_out))))
            if answer is None:
                break
            if answer.refused is not None:
                error = from_info(answer.refused)
                if not isinstance(error, Unavailable):
                    raise error
                break  # it knows nobody; we may have heard of somebody already
            instance = self._find(answer.instance)
            if instance is not None:
                return Decision(instance, answer.overlap_blocks, answer.predicted_ms, answer.kv_sources)
            # Lost to us and not yet to the router, or known to it and not yet to us.
            self._link.stats.fallbacks["unusable_instance"] += 1
            left_out = left_out | self._unusable() | {answer.instance or InstanceId("")}
        return await self._local.route(request, excluded)

    def begun(self, decision: Decision) -> None:
        """Nothing is booked."""

    def free(self, decision: Decision) -> None:
        """Nothing is booked."""

    async def close(self) -> None:
        """The way to who is asked is shared."""

    def _find(self, instance_id: InstanceId | None) -> Instance | None:
        return next((found for found in self._client.candidates() if found.id == instance_id), None)

    def _unusable(self) -> frozenset[InstanceId]:
        usable = {instance.id for instance in self._client.candidates()}
        return frozenset(
            instance.id
            for instance in self._client.instances()
            if instance.state is InstanceState.READY and instance.id not in usable
        )


def _without_content(request: Request) -> Request:
    return Request(
        request_id=request.request_id,
        model=request.model,
        token_ids=(),
        stop=_NO_TOKENS,
        lora=request.lora,
        routing=request.routing,
    )
