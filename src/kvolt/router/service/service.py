"""One router for several frontends, as a process: it decides for all of them and carries nothing.

Watches the components that it is asked about and holds a router for each, so that one rotation, one index and one set
of bookings stand for all frontends. What it books for a frontend lasts until that one says that it is over, or is lost:
bookings belong to a session, which is a stream that the frontend holds open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec

from kvolt.core.errors import KvoltError, Overloaded, Unavailable, to_info
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker_report import BREAKER_DETAILS, describe_breakers
from kvolt.router.explanation import EXPLAIN_ENDPOINT, Explanation, explain_route
from kvolt.router.port import Decision, Router, RouterContext
from kvolt.router.queue.queue_router import QueueRouter
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.router.service.messages import (
    SESSION_ENDPOINT,
    Attach,
    Begun,
    Freed,
    Moved,
    News,
    RouteAnswer,
    RouteQuestion,
    answer_of,
    router_endpoint,
)
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.endpoint.server import decoder
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

MAX_COMPONENTS = 1024
"""Watched at once; the one not asked about for longest makes room."""
MAX_SESSIONS = 4096
MAX_HELD = 1_000_000
"""Bookings of one session."""

_SYNC_S = 0.5
_PATIENCE_S = 0.3
"""A question that is not decided by then is told to wait, and again: so silence means that there is no router."""

_decode_question = msgspec.msgpack.Decoder(RouteQuestion).decode
_decode_word = msgspec.msgpack.Decoder(Attach | News).decode


@dataclass(slots=True)
class Component:
    """What is asked about: its instances, and who decides among them."""

    client: EndpointClient
    router: Router
    block_size: int
    role: Role = Role.AGGREGATED
    is_synced: bool = False
    """Discovery has told of its workers, or had its time to."""
    num_decisions: int = 0

    async def close(self) -> None:
        await self.router.close()
        await self.client.close()


class Session:
    """One frontend's bookings."""

    def __init__(self, stream: IncomingStream) -> None:
        self._stream = stream
        self._held: dict[int, tuple[Router, Decision]] = {}
        self._num_moves = 0
        self.is_over = False

    @property
    def num_held(self) -> int:
        return len(self._held)

    def hold(self, ticket: int, router: Router, decision: Decision) -> None:
        """At once over again when the session is."""
        self.free(ticket)
        if self.is_over:
            router.free(decision, None)
            return
        self._held[ticket] = (router, decision)
        if decision.recall is not None:
            decision.recall.move = partial(self._move, ticket, router)

    def _move(self, ticket: int, router: Router, elsewhere: Decision) -> bool:
        """Who carries the request is told; what comes of it is told as of any other."""
        if ticket not in self._held or not self._stream.writable:
            return False
        self._num_moves += 1
        to_ticket = -self._num_moves  # who asks counts upwards
        self.hold(to_ticket, router, elsewhere)
        self._stream.send(Moved(ticket, to_ticket, answer_of(elsewhere)))
        return True

    def hear(self, begun: Iterable[Begun], freed: Iterable[Freed]) -> None:
        """Of tickets that are not held nothing is said: they were never decided, or are over."""
        for first in begun:
            held = self._held.get(first.ticket)
            if held is not None:
                held[0].begun(held[1], first.cached_tokens)
        for end in freed:
            self.free(end.ticket, end)

    def free(self, ticket: int, end: Freed | None = None) -> None:
        held = self._held.pop(ticket, None)
        if held is None:
            return
        router, decision = held
        if end is None:
            router.free(decision, None)
        else:
            router.free(decision, end.usage, end.outcome)

    def close(self) -> None:
        self.is_over = True
        while self._held:
            self.free(next(iter(self._held)))


class _Patience:
    """A question that has to wait, and whoever asked it is told so now and then. Given up with the block."""

    def __init__(
        self, crew: Crew, router: QueueRouter, request: Request, excluded: frozenset[InstanceId]
    ) -> None:
        self._router = router
        self._routing = crew.start(router.route(request, excluded), "wait")
        self._is_taken = False

    async def wait(self) -> bool:
        """Whether it is decided."""
        return bool((await asyncio.wait([self._routing], timeout=_PATIENCE_S))[0])

    def take(self) -> Decision:
        self._is_taken = True
        decision: Decision = self._routing.result()
        return decision

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        routing = self._routing
        if self._is_taken or routing.cancel():
            return
        if not routing.cancelled() and routing.exception() is None:
            self._router.free(routing.result(), None)  # decided in the very tick in which it was given up


class RouterService:
    """Answers RouteQuestions. `start` registers it; `close` ends its watching."""

    def __init__(
        self,
        runtime: Runtime,
        namespace: str,
        new_router: NewRouter = ROUTERS["round-robin"],
        settings: RouterSettings | None = None,
        max_components: int = MAX_COMPONENTS,
    ) -> None:
        self._runtime = runtime
        self._endpoint = router_endpoint(namespace)
        self._new_router = new_router
        self._settings = settings or RouterSettings()
        self._max_components = max_components
        self._opening = asyncio.Lock()
        self._waiting = Crew("waiting requests", on_error=lambda error: None)
        """What they fail of is told to who asked."""
        self.components: dict[str, Component] = {}
        """By endpoint, the one not asked about for longest first."""
        self.sessions: dict[str, Session] = {}
        self.num_refused = 0

    @property
    def num_held(self) -> int:
        """What all frontends together have under way."""
        return sum(session.num_held for session in self.sessions.values())

    def routers(self) -> list[Router]:
        """Of all components that are watched."""
        return [component.router for component in self.components.values()]

    async def start(self) -> Instance:
        self._runtime.add_details("router", self._describe)
        self._runtime.add_details(BREAKER_DETAILS, lambda: describe_breakers(self.routers()))
        server = self._runtime.server
        server.add(SESSION_ENDPOINT, InstanceId(""), self._on_word)
        explain = server.generator(self._explain, decoder(RouteQuestion))
        server.add(EXPLAIN_ENDPOINT, InstanceId(""), explain)
        return await self._runtime.serve_streams(self._endpoint, self._on_question)

    async def close(self) -> None:
        await self._runtime.withdraw(self._endpoint)
        self._runtime.server.remove(SESSION_ENDPOINT)
        self._runtime.server.remove(EXPLAIN_ENDPOINT)
        await self._waiting.close()
        while self.sessions:
            self.sessions.popitem()[1].close()
        while self.components:
            await self.components.popitem()[1].close()

    def _describe(self) -> dict[str, int]:
        return {
            "components": len(self.components),
            "decisions": sum(component.num_decisions for component in self.components.values()),
            "sessions": len(self.sessions),
            "bookings": self.num_held,
        }

    # --- sessions

    def _on_word(self, stream: IncomingStream) -> None:
        match stream.decode_body(_decode_word):
            case Attach(session=name):
                self._attach(name, stream)
            case News(session=name, begun=begun, freed=freed):
                session = self.sessions.get(name)
                if session is not None:
                    session.hear(begun, freed)
                stream.end()

    def _attach(self, name: str, stream: IncomingStream) -> None:
        if len(self.sessions) >= MAX_SESSIONS:
            raise Overloaded(
                f"{MAX_SESSIONS} processes ask this router already", queue="sessions", limit=MAX_SESSIONS
            )
        if name in self.sessions:
            raise KvoltError(f"there is a session {name} already")
        session = self.sessions[name] = Session(stream)

        def end(error: KvoltError) -> None:
            if session.num_held:
                log.info("a frontend is gone (%s): %d requests are over", error.message, session.num_held)
            self.sessions.pop(name, None)
            session.close()

        stream.on_cancel = end

    # --- questions

    def _on_question(self, stream: IncomingStream) -> None:
        """Nearly every question can be answered at once: then without a task of its own."""
        question: RouteQuestion = stream.decode_body(_decode_question)
        answer = self._answer_now(question)
        if answer is None:
            self._runtime.server.generator(self._serve, lambda body: question)(stream)
        else:
            stream.send(answer)
            stream.end()

    def _answer_now(self, question: RouteQuestion) -> RouteAnswer | None:
        """None where something has to be waited for."""
        component = self.components.pop(question.endpoint, None)
        if component is None:
            return None
        self.components[question.endpoint] = component  # asked about the latest
        router = component.router
        if not isinstance(router, QueueRouter) or not component.is_synced:
            return None
        if question.request.routing.query_only:
            return None
        try:
            session = self._session_of(question)
            self._check(question, component)
            decision = router.route_now(question.whole_request(), frozenset(question.excluded))
        except KvoltError as error:
            return self._refused(error)
        return None if decision is None else self._decided(question, session, component, decision)

    async def _serve(self, question: RouteQuestion) -> AsyncIterator[RouteAnswer]:
        try:
            session = self._session_of(question)
            component = await self._component(question)
            request, excluded = question.whole_request(), frozenset(question.excluded)
            router = component.router
            if isinstance(router, QueueRouter) and not request.routing.query_only:
                async with _Patience(self._waiting, router, request, excluded) as patience:
                    while not await patience.wait():
                        yield RouteAnswer(waits=True)
                    decision = patience.take()
            else:
                decision = await router.route(request, excluded)
        except KvoltError as error:
            yield self._refused(error)
            return
        yield self._decided(question, session, component, decision)

    def _decided(
        self, question: RouteQuestion, session: Session | None, component: Component, decision: Decision
    ) -> RouteAnswer:
        component.num_decisions += 1
        if session is None or question.request.routing.query_only:
            component.router.free(decision, None)
        else:
            session.hold(question.ticket, component.router, decision)
        return answer_of(decision)

    def _refused(self, error: KvoltError) -> RouteAnswer:
        self.num_refused += 1
        return RouteAnswer(refused=to_info(error))

    async def _explain(self, question: RouteQuestion) -> AsyncIterator[Explanation]:
        component = await self._component(question)
        yield explain_route(component.router, question.whole_request(), self._runtime.options.name)

    def _session_of(self, question: RouteQuestion) -> Session | None:
        """With what it had to say besides. Unavailable for one that is over: who asks will begin another."""
        if not question.session:
            return None
        session = self.sessions.get(question.session)
        if session is None:
            raise Unavailable("the session is over", endpoint=str(self._endpoint), reason="no_session")
        session.hear(question.begun, question.freed)
        if session.num_held >= MAX_HELD:
            raise Overloaded(
                f"{MAX_HELD} requests of this frontend are under way", queue="session", limit=MAX_HELD
            )
        return session

    async def _component(self, question: RouteQuestion) -> Component:
        component = self.components.pop(question.endpoint, None)
        if component is None:
            component = await self._open(question)
        else:
            self.components[question.endpoint] = component
        self._check(question, component)
        await component.client.wait_synced(_SYNC_S)
        component.is_synced = True
        return component

    def _check(self, question: RouteQuestion, component: Component) -> None:
        if question.block_size and component.block_size and question.block_size != component.block_size:
            raise Unavailable(
                f"blocks of {question.endpoint} have {component.block_size} tokens here and "
                f"{question.block_size} at the caller: run the same version of kvolt on both",
                endpoint=question.endpoint,
                reason="block_size",
            )
        if question.role is not component.role:
            raise Unavailable(
                f"{question.endpoint} is {component.role} here and {question.role} at the caller: "
                "run the same version of kvolt on both",
                endpoint=question.endpoint,
                reason="role",
            )

    async def _open(self, question: RouteQuestion) -> Component:
        endpoint = question.endpoint
        address = EndpointAddress.parse(endpoint)
        async with self._opening:
            if endpoint in self.components:
                return self.components[endpoint]
            while len(self.components) >= self._max_components:
                oldest = next(iter(self.components))
                await self.components.pop(oldest).close()
            client = await self._runtime.client(address)
            context = RouterContext(client, self._runtime, question.block_size, self._settings, question.role)
            component = Component(client, self._new_router(context), question.block_size, question.role)
            self.components[endpoint] = component
            return component
