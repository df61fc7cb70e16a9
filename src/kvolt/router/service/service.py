"""Router process: decides for several frontends.

Holds one router per component that is asked for, so that all frontends share one rotation, one index and one set of
reservations. Reservations belong to a session, a stream that the frontend holds open: they end when the frontend
releases them or the stream ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec

from kvolt.core.endpoints import QUEUE_DETAILS, EndpointAddress, Instance
from kvolt.core.errors import KvoltError, Overloaded, Unavailable, to_info
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import BREAKER_DETAILS
from kvolt.router.explanation import EXPLAIN_ENDPOINT, Explanation, explain_route
from kvolt.router.metrics import describe_breakers, describe_queues
from kvolt.router.port import Decision, Router, RouterContext
from kvolt.router.queue.queue_router import QueueRouter
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.router.service.messages import (
    SESSION_ENDPOINT,
    FirstTokenNotice,
    OpenSession,
    ReleaseNotice,
    RerouteNotice,
    ReservationUpdates,
    RouteRequest,
    RouteResponse,
    router_endpoint,
    to_response,
)
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

MAX_COMPONENTS = 1024
"""Components with a router; the least recently used one is closed beyond it."""
MAX_SESSIONS = 4096
MAX_HELD = 1_000_000
"""Reservations per session."""

_SYNC_S = 0.5
_KEEPALIVE_S = 0.3
"""Interval of keepalives for a queued request: a silent router is treated as lost."""

_decode_request = msgspec.msgpack.Decoder(RouteRequest).decode
_decode_session_message = msgspec.msgpack.Decoder(OpenSession | ReservationUpdates).decode


@dataclass(slots=True)
class Component:
    """One endpoint: its instances and their router."""

    client: EndpointClient
    router: Router
    block_size: int
    role: Role = Role.AGGREGATED
    is_synced: bool = False
    """Discovery has listed its workers, or timed out."""
    num_decisions: int = 0

    async def close(self) -> None:
        await self.router.close()
        await self.client.close()


class FrontendReservations:
    """Reservations of one frontend."""

    def __init__(self, stream: IncomingStream) -> None:
        self._stream = stream
        self._held: dict[int, tuple[Router, Decision]] = {}
        self._num_moves = 0
        self.is_over = False

    @property
    def num_held(self) -> int:
        return len(self._held)

    def hold(self, ticket: int, router: Router, decision: Decision) -> None:
        """Keep a reservation until its release or the end of the session."""
        self.release(ticket)
        if self.is_over:
            router.release(decision, None)
            return
        self._held[ticket] = (router, decision)
        if decision.withdraw_hook is not None:
            decision.withdraw_hook.try_move = partial(self._move, ticket, router)

    def _move(self, ticket: int, router: Router, new_decision: Decision) -> bool:
        """Notify the frontend of a better worker. Its outcome is reported like that of any ticket."""
        if ticket not in self._held or not self._stream.writable:
            return False
        self._num_moves += 1
        to_ticket = -self._num_moves  # tickets of the frontend are positive
        self.hold(to_ticket, router, new_decision)
        self._stream.send(RerouteNotice(ticket, to_ticket, to_response(new_decision)))
        return True

    def apply_updates(
        self, first_tokens: Iterable[FirstTokenNotice], releases: Iterable[ReleaseNotice]
    ) -> None:
        """Apply updates. Tickets that are not held are ignored: never decided, or ended."""
        for first in first_tokens:
            reserved = self._held.get(first.ticket)
            if reserved is not None:
                reserved[0].mark_first_token(reserved[1], first.cached_tokens)
        for end in releases:
            self.release(end.ticket, end)

    def release(self, ticket: int, end: ReleaseNotice | None = None) -> None:
        reserved = self._held.pop(ticket, None)
        if reserved is None:
            return
        router, decision = reserved
        if end is None:
            router.release(decision, None)
        else:
            router.release(decision, end.usage, end.outcome)

    def close(self) -> None:
        self.is_over = True
        while self._held:
            self.release(next(iter(self._held)))


class _PendingRoute:
    """A queued request that yields keepalives. Withdrawn from the queue when the block ends."""

    def __init__(
        self, task_group: TaskGroup, router: QueueRouter, request: Request, excluded: frozenset[InstanceId]
    ) -> None:
        self._router = router
        self._task = task_group.start(router.route(request, excluded), "wait")
        self._has_result = False

    async def wait(self) -> bool:
        """Wait until the next keepalive; return whether there is a decision."""
        return bool((await asyncio.wait([self._task], timeout=_KEEPALIVE_S))[0])

    def result(self) -> Decision:
        self._has_result = True
        decision: Decision = self._task.result()
        return decision

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        routing = self._task
        if self._has_result or routing.cancel():
            return
        if not routing.cancelled() and routing.exception() is None:
            self._router.release(routing.result(), None)  # decided in the tick in which it was cancelled


class RouterService:
    """Serves RouteRequests. `start` registers it; `close` releases everything."""

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
        self._waiting = TaskGroup("waiting requests", on_error=lambda error: None)
        """Tasks of queued requests; their errors are sent to the frontends."""
        self.components: dict[str, Component] = {}
        """By endpoint, least recently used first."""
        self.sessions: dict[str, FrontendReservations] = {}
        self.num_refused = 0

    @property
    def num_held(self) -> int:
        """Reservations of all frontends."""
        return sum(session.num_held for session in self.sessions.values())

    def routers(self) -> list[Router]:
        """Routers of all components."""
        return [component.router for component in self.components.values()]

    async def start(self) -> Instance:
        self._runtime.add_status_details("router", self._describe)
        self._runtime.add_status_details(BREAKER_DETAILS, lambda: describe_breakers(self.routers()))
        self._runtime.add_status_details(QUEUE_DETAILS, lambda: describe_queues(self.routers()))
        server = self._runtime.server
        server.register(SESSION_ENDPOINT, InstanceId(""), self._on_session_message)
        explain = server.wrap_generator(self._explain, msgpack_decoder(RouteRequest))
        server.register(EXPLAIN_ENDPOINT, InstanceId(""), explain)
        return await self._runtime.serve_streams(self._endpoint, self._on_request)

    async def close(self) -> None:
        await self._runtime.stop_serving(self._endpoint)
        self._runtime.server.unregister(SESSION_ENDPOINT)
        self._runtime.server.unregister(EXPLAIN_ENDPOINT)
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
            "reservations": self.num_held,
        }

    # --- sessions

    def _on_session_message(self, stream: IncomingStream) -> None:
        match stream.decode_body(_decode_session_message):
            case OpenSession(session=name):
                self._open_session(name, stream)
            case ReservationUpdates(session=name, first_tokens=first_tokens, releases=releases):
                session = self.sessions.get(name)
                if session is not None:
                    session.apply_updates(first_tokens, releases)
                stream.end()

    def _open_session(self, name: str, stream: IncomingStream) -> None:
        if len(self.sessions) >= MAX_SESSIONS:
            raise Overloaded(
                f"there are {MAX_SESSIONS} sessions already", queue="sessions", limit=MAX_SESSIONS
            )
        if name in self.sessions:
            raise KvoltError(f"there is a session {name} already")
        session = self.sessions[name] = FrontendReservations(stream)

        def end(error: KvoltError) -> None:
            if session.num_held:
                log.info("frontend lost: released=%d reason=%s", session.num_held, error.message)
            self.sessions.pop(name, None)
            session.close()

        stream.on_cancel = end

    # --- requests

    def _on_request(self, stream: IncomingStream) -> None:
        """Most requests can be answered at once, without a task."""
        request_message: RouteRequest = stream.decode_body(_decode_request)
        response = self._respond_now(request_message)
        if response is None:
            self._runtime.server.wrap_generator(self._serve, lambda body: request_message)(stream)
        else:
            stream.send(response)
            stream.end()

    def _respond_now(self, request_message: RouteRequest) -> RouteResponse | None:
        """Decide without waiting; None if that is not possible."""
        component = self.components.pop(request_message.endpoint, None)
        if component is None:
            return None
        self.components[request_message.endpoint] = component  # most recently used
        router = component.router
        if not isinstance(router, QueueRouter) or not component.is_synced:
            return None
        if request_message.request.routing.query_only:
            return None
        try:
            session = self._session_of(request_message)
            self._check(request_message, component)
            decision = router.route_now(request_message.full_request(), frozenset(request_message.excluded))
        except KvoltError as error:
            return self._to_refusal(error)
        return None if decision is None else self._to_response(request_message, session, component, decision)

    async def _serve(self, request_message: RouteRequest) -> AsyncIterator[RouteResponse]:
        try:
            session = self._session_of(request_message)
            component = await self._component(request_message)
            request, excluded = request_message.full_request(), frozenset(request_message.excluded)
            router = component.router
            if isinstance(router, QueueRouter) and not request.routing.query_only:
                async with _PendingRoute(self._waiting, router, request, excluded) as pending:
                    while not await pending.wait():
                        yield RouteResponse(is_queued=True)
                    decision = pending.result()
            else:
                decision = await router.route(request, excluded)
        except KvoltError as error:
            yield self._to_refusal(error)
            return
        yield self._to_response(request_message, session, component, decision)

    def _to_response(
        self,
        request_message: RouteRequest,
        session: FrontendReservations | None,
        component: Component,
        decision: Decision,
    ) -> RouteResponse:
        component.num_decisions += 1
        if session is None or request_message.request.routing.query_only:
            component.router.release(decision, None)
        else:
            session.hold(request_message.ticket, component.router, decision)
        return to_response(decision)

    def _to_refusal(self, error: KvoltError) -> RouteResponse:
        self.num_refused += 1
        return RouteResponse(refused=to_info(error))

    async def _explain(self, request_message: RouteRequest) -> AsyncIterator[Explanation]:
        component = await self._component(request_message)
        yield explain_route(component.router, request_message.full_request(), self._runtime.options.name)

    def _session_of(self, request_message: RouteRequest) -> FrontendReservations | None:
        """Session of a request, with its updates applied. Raises Unavailable if it ended: the caller opens a
        new one."""
        if not request_message.session:
            return None
        session = self.sessions.get(request_message.session)
        if session is None:
            raise Unavailable("the session is over", endpoint=str(self._endpoint), reason="no_session")
        session.apply_updates(request_message.first_tokens, request_message.releases)
        if session.num_held >= MAX_HELD:
            raise Overloaded(f"this frontend has {MAX_HELD} reservations", queue="session", limit=MAX_HELD)
        return session

    async def _component(self, request_message: RouteRequest) -> Component:
        component = self.components.pop(request_message.endpoint, None)
        if component is None:
            component = await self._open(request_message)
        else:
            self.components[request_message.endpoint] = component
        self._check(request_message, component)
        await component.client.wait_synced(_SYNC_S)
        component.is_synced = True
        return component

    def _check(self, request_message: RouteRequest, component: Component) -> None:
        if (
            request_message.block_size
            and component.block_size
            and request_message.block_size != component.block_size
        ):
            raise Unavailable(
                f"blocks of {request_message.endpoint} have {component.block_size} tokens here and "
                f"{request_message.block_size} at the caller: run the same version of kvolt on both",
                endpoint=request_message.endpoint,
                reason="block_size",
            )
        if request_message.role is not component.role:
            raise Unavailable(
                f"{request_message.endpoint} is {component.role} here and {request_message.role} at the caller: "
                "run the same version of kvolt on both",
                endpoint=request_message.endpoint,
                reason="role",
            )

    async def _open(self, request_message: RouteRequest) -> Component:
        endpoint = request_message.endpoint
        address = EndpointAddress.parse(endpoint)
        async with self._opening:
            if endpoint in self.components:
                return self.components[endpoint]
            while len(self.components) >= self._max_components:
                oldest = next(iter(self.components))
                await self.components.pop(oldest).close()
            client = await self._runtime.client(address)
            client.has_fallback = request_message.role is Role.PREFILL  # as at the frontends
            context = RouterContext(
                client, self._runtime, request_message.block_size, self._settings, request_message.role
            )
            component = Component(
                client, self._new_router(context), request_message.block_size, request_message.role
            )
            self.components[endpoint] = component
            return component
