"""Link of a process to the router process, and the sessions that hold its reservations.

Reservations at the router process last as long as the session with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.endpoints import Instance
from kvolt.core.errors import DeadlineExceeded, KvoltError, NetworkFault
from kvolt.core.ids import InstanceId
from kvolt.router.breaker import Outcome
from kvolt.router.explanation import EXPLAIN_ENDPOINT, Explanation
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
)
from kvolt.runtime.clock import new_id
from kvolt.runtime.endpoint.call import Call, Deadlines, open_call, open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_COOLDOWN_S = 1.0
"""Pause after a timeout, so that a silent router does not delay every request."""
_SEND_DELAY_S = 0.002
"""Delay of updates that no route request has carried by then."""
_RETRY_S = 0.5
_FOREVER_S = 3650 * 86_400.0

_decode_response = msgspec.msgpack.Decoder(RouteResponse).decode
_decode_explanation = msgspec.msgpack.Decoder(Explanation).decode
_decode_notice = msgspec.msgpack.Decoder(RerouteNotice).decode


@dataclass(slots=True)
class LinkStats:
    """Outcomes of route requests, for metrics."""

    num_answered: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Requests routed locally, by reason."""


class RouterSession:
    """Session with one router process: the sink of its stream."""

    def __init__(self, link: RouterLink, router: Instance, name: str) -> None:
        self._link = link
        self._num_tickets = 0
        self._first_tokens: list[FirstTokenNotice] = []
        self._releases: list[ReleaseNotice] = []
        self._movable: dict[int, Callable[[RemoteReservation], None]] = {}
        """Receivers of a RerouteNotice for requests without a first token, by ticket."""
        self.router = router
        self.name = name
        self.is_open = True
        self.is_sending = False
        self.timer: asyncio.TimerHandle | None = None
        """Timer of pending updates."""
        self.call: Call | None = None

    def new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def on_reroute(self, ticket: int, reroute: Callable[[RemoteReservation], None]) -> None:
        """Accept RerouteNotices for a request until its first token or end."""
        self._movable[ticket] = reroute

    def report_first_token(self, ticket: int, cached_tokens: int | None) -> None:
        self._movable.pop(ticket, None)
        if self.is_open:
            self._first_tokens.append(FirstTokenNotice(ticket, cached_tokens))
            self._link.send_soon(self)

    def report_release(self, ticket: int, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self._movable.pop(ticket, None)
        if self.is_open:
            self._releases.append(ReleaseNotice(ticket, usage, outcome))
            self._link.send_soon(self)

    @property
    def has_updates(self) -> bool:
        return bool(self._first_tokens or self._releases)

    def take_updates(self) -> tuple[tuple[FirstTokenNotice, ...], tuple[ReleaseNotice, ...]]:
        updates = tuple(self._first_tokens), tuple(self._releases)
        self._first_tokens, self._releases = [], []
        return updates

    def requeue_updates(self, updates: ReservationUpdates) -> None:
        """Put updates back that could not be sent, before later ones."""
        self._first_tokens[:0] = updates.first_tokens
        self._releases[:0] = updates.releases

    def on_item(self, notice: RerouteNotice) -> None:
        remote = RemoteReservation(notice.response, self, notice.to_ticket)
        reroute = self._movable.get(notice.ticket)
        if reroute is None:  # started or ended
            remote.release(None)
        else:
            reroute(remote)

    def close(self) -> None:
        if self.call is not None:
            self.call.cancel()  # `on_end` follows

    def on_end(self, error: KvoltError | None) -> None:
        """End of the session: the router process has released all reservations."""
        self.is_open = False
        if self.timer is not None:
            self.timer.cancel()
        self._movable.clear()
        self._first_tokens, self._releases = [], []
        self._link.drop_session(self)


@dataclass(frozen=True, slots=True)
class RemoteReservation:
    """A response with the session and ticket of its reservation."""

    response: RouteResponse
    session: RouterSession
    ticket: int

    def mark_first_token(self, cached_tokens: int | None) -> None:
        self.session.report_first_token(self.ticket, cached_tokens)

    def release(self, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.session.report_release(self.ticket, usage, outcome)


class RouterLink:
    """Link of a process to the router process, shared by all models."""

    def __init__(self, runtime: Runtime, client: EndpointClient, timeout_s: float = _TIMEOUT_S) -> None:
        self._runtime = runtime
        self._client = client
        self._timeout_s = timeout_s
        self._deadlines = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=timeout_s, total_s=_FOREVER_S
        )
        self._loop = asyncio.get_running_loop()
        self._cooldown_until = 0.0
        self._is_available = True
        self._sessions: dict[InstanceId, RouterSession] = {}
        self._opening = asyncio.Lock()
        self._task_group = TaskGroup("router link")
        self.stats = LinkStats()

    @classmethod
    async def to(cls, runtime: Runtime, namespace: str) -> RouterLink:
        """Link to the router process of a namespace, whether it exists or not."""
        return cls(runtime, await runtime.client(router_endpoint(namespace)))

    async def wait_synced(self, timeout_s: float) -> None:
        """Wait until discovery has shown whether there is a router process, or the timeout has passed."""
        await self._client.wait_synced(timeout_s)

    @property
    def present(self) -> bool:
        """Whether requests are routed by the router process now."""
        return bool(self._client.candidates()) and self._loop.time() >= self._cooldown_until

    async def close(self) -> None:
        """End all sessions, which releases their reservations."""
        await self._task_group.close()
        for session in list(self._sessions.values()):
            session.close()

    async def route(self, request: RouteRequest) -> RemoteReservation | None:
        """Route a request; None if no router process is usable now, which is logged on change.

        Release the reservation with `RemoteReservation.release`. A call that raises or is cancelled reserves nothing.
        """
        routers = self._client.candidates()
        if not routers:
            self._fall_back("absent", "none is reachable")
            return None
        if self._loop.time() < self._cooldown_until:
            self._fall_back("cooldown", "no response in time")
            return None
        try:
            # The first by id, so that all frontends of a namespace use the same one; others stand by.
            remote = await self._route(request, routers[0])
        except KvoltError as error:
            if isinstance(error, DeadlineExceeded):
                self._cooldown_until = self._loop.time() + _COOLDOWN_S
            self._fall_back(error.code, error.message)
            return None
        if not self._is_available:
            self._is_available = True
            log.info("router process responds again")
        self.stats.num_answered += 1
        return remote

    async def explain(self, request: RouteRequest) -> Explanation | None:
        """None if no router process is usable now."""
        if not self.present:
            return None
        to = Destination(self._client.candidates()[0].address, EXPLAIN_ENDPOINT)
        try:
            async with await open_stream(
                self._runtime.plane, to, request, self._deadlines, _decode_explanation
            ) as stream:
                explanation: Explanation = await anext(stream)
        except NetworkFault:
            return None
        return explanation

    async def _route(self, request: RouteRequest, router: Instance) -> RemoteReservation:
        session = self._sessions.get(router.id) or await self._open(router)
        ticket = session.new_ticket()
        first_tokens, releases = session.take_updates()
        route_request = msgspec.structs.replace(
            request, session=session.name, ticket=ticket, first_tokens=first_tokens, releases=releases
        )
        try:
            response = await self._call(route_request, router)
        except BaseException:
            # The router may have decided and may not have received the updates.
            session.requeue_updates(ReservationUpdates(session.name, first_tokens, releases))
            session.report_release(ticket, None)
            raise
        return RemoteReservation(response, session, ticket)

    async def _call(self, request: RouteRequest, router: Instance) -> RouteResponse:
        async with await self._client.stream(request, router, self._deadlines, _decode_response) as stream:
            response: RouteResponse | None = await anext(stream, None)
            while response is not None and response.is_queued:
                response = await anext(stream, None)
        if response is None:
            raise KvoltError("the response stream ended without a decision")
        return response

    def _fall_back(self, reason: str, why: str) -> None:
        self.stats.fallbacks[reason] += 1
        if self._is_available:
            self._is_available = False
            log.warning("router process unavailable, routing locally: %s", why)

    # --- sessions

    async def _open(self, router: Instance) -> RouterSession:
        async with self._opening:
            known = self._sessions.get(router.id)
            if known is not None:
                return known
            session = RouterSession(self, router, new_id(self._runtime.ports.rng))
            limits = msgspec.structs.replace(self._deadlines, first_s=_FOREVER_S, between_s=_FOREVER_S)
            session.call = Call(session, limits, automatic_credit=True)
            to = Destination(router.address, SESSION_ENDPOINT, router.identity)
            try:
                await open_call(
                    self._runtime.plane, to, OpenSession(session.name), session.call, _decode_notice
                )
            except NetworkFault:
                self._cooldown_until = self._loop.time() + _COOLDOWN_S
                raise
            self._sessions[router.id] = session
            return session

    def drop_session(self, session: RouterSession) -> None:
        """Forget a session that has ended."""
        if self._sessions.get(session.router.id) is session:
            del self._sessions[session.router.id]

    def send_soon(self, session: RouterSession) -> None:
        """Schedule updates: the next route request carries them, or they are sent alone."""
        if not session.is_sending and not self._task_group.closed:
            session.is_sending = True
            session.timer = self._loop.call_later(_SEND_DELAY_S, self._start_sending, session)

    def _start_sending(self, session: RouterSession) -> None:
        session.timer = None
        if session.has_updates:
            self._task_group.start(self._send_updates(session), "updates")
        else:
            session.is_sending = False

    async def _send_updates(self, session: RouterSession) -> None:
        """Send updates until none are left or the session has ended."""
        limits = msgspec.structs.replace(self._deadlines, total_s=self._timeout_s)
        to = Destination(session.router.address, SESSION_ENDPOINT)
        try:
            while session.is_open and session.has_updates:
                updates = ReservationUpdates(session.name, *session.take_updates())
                try:
                    async with await open_stream(self._runtime.plane, to, updates, limits) as stream:
                        await anext(stream, None)
                except KvoltError as error:
                    log.debug("reservation updates failed: %s", error.message)
                    if session.is_open:
                        session.requeue_updates(updates)
                        await asyncio.sleep(_RETRY_S)
        finally:
            session.is_sending = False
