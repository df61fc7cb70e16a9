"""Those who ask a router process: the link of a process to it, and the Router port of each of its models.

A frontend that cannot ask decides alone at once, and asks again by itself when it can. What the router process has
booked for this process is booked for as long as the session with it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import DeadlineExceeded, KvoltError, NetworkFault, Unavailable, from_info
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Outcome
from kvolt.router.explanation import EXPLAIN_ENDPOINT, Explanation, explain_route
from kvolt.router.policy.forecast import Forecast, Forecasting
from kvolt.router.port import Decision, Recall, Router, RouterContext
from kvolt.router.registry import NewRouter
from kvolt.router.service.messages import (
    SESSION_ENDPOINT,
    Attach,
    Begun,
    Freed,
    Moved,
    News,
    RouteAnswer,
    RouteQuestion,
    question_of,
    router_endpoint,
)
from kvolt.runtime.clock import new_id
from kvolt.runtime.endpoint.address import Instance, InstanceState
from kvolt.runtime.endpoint.call import Call, Deadlines
from kvolt.runtime.endpoint.client import EndpointClient, open_call, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_ASK_S = 1.0
_REST_S = 1.0
"""After a router that did not answer in time: a silent one must not cost every request its deadline."""
_TELL_AFTER_S = 0.002
"""What is over is told with the next question; without one, this much later."""
_RETRY_S = 0.5
_MAX_ASKS = 2
_FOREVER_S = 3650 * 86_400.0

_decode_answer = msgspec.msgpack.Decoder(RouteAnswer).decode
_decode_explanation = msgspec.msgpack.Decoder(Explanation).decode
_decode_moved = msgspec.msgpack.Decoder(Moved).decode


@dataclass(slots=True)
class LinkStats:
    """How asking went, for metrics."""

    num_answered: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Requests routed without the router, by reason."""


class RouterSession:
    """Our standing with one router process: the sink of the stream that keeps it."""

    def __init__(self, link: RouterLink, router: Instance, name: str) -> None:
        self._link = link
        self._num_tickets = 0
        self._begun: list[Begun] = []
        self._freed: list[Freed] = []
        self._carried: dict[int, tuple[RemoteRouter, Decision]] = {}
        """By ticket: requests that have not begun and could be moved."""
        self.router = router
        self.name = name
        self.is_open = True
        self.is_telling = False
        self.timer: asyncio.TimerHandle | None = None
        """For what is to be told, while no question has taken it along."""
        self.call: Call | None = None

    def new_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def carry(self, ticket: int, router: RemoteRouter, decision: Decision) -> None:
        """Until it begins or is over, the router process may want it elsewhere."""
        self._carried[ticket] = (router, decision)

    def begin(self, ticket: int, cached_tokens: int | None) -> None:
        self._carried.pop(ticket, None)
        if self.is_open:
            self._begun.append(Begun(ticket, cached_tokens))
            self._link.tell_soon(self)

    def free(self, ticket: int, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self._carried.pop(ticket, None)
        if self.is_open:
            self._freed.append(Freed(ticket, usage, outcome))
            self._link.tell_soon(self)

    @property
    def has_news(self) -> bool:
        return bool(self._begun or self._freed)

    def take_news(self) -> tuple[tuple[Begun, ...], tuple[Freed, ...]]:
        news = tuple(self._begun), tuple(self._freed)
        self._begun, self._freed = [], []
        return news

    def put_back(self, news: News) -> None:
        """They could not be told; they come before what came since."""
        self._begun[:0] = news.begun
        self._freed[:0] = news.freed

    def on_item(self, moved: Moved) -> None:
        asked = Asked(moved.answer, self, moved.to_ticket)
        carried = self._carried.get(moved.ticket)
        if carried is None:  # it has begun, or is over
            asked.free(None)
        else:
            carried[0].move(carried[1], asked)

    def close(self) -> None:
        if self.call is not None:
            self.call.cancel()  # `on_end` follows

    def on_end(self, error: KvoltError | None) -> None:
        """Whatever was booked over there is over."""
        self.is_open = False
        if self.timer is not None:
            self.timer.cancel()
        self._carried.clear()
        self._begun, self._freed = [], []
        self._link.forget(self)


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer, and by which name it is known over there what was booked."""

    answer: RouteAnswer
    session: RouterSession
    ticket: int

    def begin(self, cached_tokens: int | None) -> None:
        self.session.begin(self.ticket, cached_tokens)

    def free(self, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.session.free(self.ticket, usage, outcome)


class RouterLink:
    """A process's way to the router process, shared by all its models."""

    def __init__(self, runtime: Runtime, client: EndpointClient, ask_s: float = _ASK_S) -> None:
        self._runtime = runtime
        self._client = client
        self._ask_s = ask_s
        self._deadlines = Deadlines(connect_s=ask_s, first_s=ask_s, between_s=ask_s, total_s=_FOREVER_S)
        self._loop = asyncio.get_running_loop()
        self._resting_until = 0.0
        self._answers = True
        self._sessions: dict[InstanceId, RouterSession] = {}
        self._opening = asyncio.Lock()
        self._crew = Crew("router link")
        self.stats = LinkStats()

    @classmethod
    async def to(cls, runtime: Runtime, namespace: str) -> RouterLink:
        """The router process of a namespace, whether or not there is one."""
        return cls(runtime, await runtime.client(router_endpoint(namespace)))

    def new_router(self, local: NewRouter) -> NewRouter:
        """Decided by the router process, and by one made by `local` while that is away."""

        def make(context: RouterContext) -> RemoteRouter:
            return RemoteRouter(self, context.client, local(context), context.block_size, context.role)

        return make

    async def wait_synced(self, timeout_s: float) -> None:
        """Until we know whether there is one, or give up quietly."""
        await self._client.wait_synced(timeout_s)

    @property
    def present(self) -> bool:
        """Whether a router would be asked now."""
        return bool(self._client.candidates()) and self._loop.time() >= self._resting_until

    async def close(self) -> None:
        """What is booked for us is over with this."""
        await self._crew.close()
        for session in list(self._sessions.values()):
            session.close()

    async def ask(self, question: RouteQuestion) -> Asked | None:
        """None when there is no router to be had now; says so once, and once when there is one again.

        What it books is freed by `Asked.free`; when this raises or is cancelled nothing stays booked.
        """
        routers = self._client.candidates()
        if not routers:
            self._alone("absent", "none can be reached")
            return None
        if self._loop.time() < self._resting_until:
            self._alone("resting", "it did not answer in time")
            return None
        try:
            # The first by id, so that all frontends of a namespace ask the same one; others stand by.
            asked = await self._ask(question, routers[0])
        except KvoltError as error:
            if isinstance(error, DeadlineExceeded):
                self._resting_until = self._loop.time() + _REST_S
            self._alone(error.code, error.message)
            return None
        if not self._answers:
            self._answers = True
            log.info("the router answers again")
        self.stats.num_answered += 1
        return asked

    async def explain(self, question: RouteQuestion) -> Explanation | None:
        """None when there is no router to be had now."""
        if not self.present:
            return None
        to = Destination(self._client.candidates()[0].address, EXPLAIN_ENDPOINT)
        try:
            async with await open_stream(
                self._runtime.plane, to, question, self._deadlines, _decode_explanation
            ) as stream:
                told: Explanation = await anext(stream)
        except NetworkFault:
            return None
        return told

    async def _ask(self, question: RouteQuestion, router: Instance) -> Asked:
        session = self._sessions.get(router.id) or await self._open(router)
        ticket = session.new_ticket()
        begun, freed = session.take_news()
        told = msgspec.structs.replace(
            question, session=session.name, ticket=ticket, begun=begun, freed=freed
        )
        try:
            answer = await self._call(told, router)
        except BaseException:
            # It may have been decided all the same, and what went with it may not have arrived.
            session.put_back(News(session.name, begun, freed))
            session.free(ticket, None)
            raise
        return Asked(answer, session, ticket)

    async def _call(self, question: RouteQuestion, router: Instance) -> RouteAnswer:
        async with await self._client.stream(question, router, self._deadlines, _decode_answer) as stream:
            answer: RouteAnswer | None = await anext(stream, None)
            while answer is not None and answer.waits:
                answer = await anext(stream, None)
        if answer is None:
            raise KvoltError("it ended without an answer")
        return answer

    def _alone(self, reason: str, why: str) -> None:
        self.stats.fallbacks[reason] += 1
        if self._answers:
            self._answers = False
            log.warning("no router (%s): choosing workers by ourselves until there is one", why)

    # --- sessions

    async def _open(self, router: Instance) -> RouterSession:
        async with self._opening:
            known = self._sessions.get(router.id)
            if known is not None:
                return known
            session = RouterSession(self, router, new_id(self._runtime.ports.rng))
            limits = Deadlines(
                connect_s=self._ask_s, first_s=_FOREVER_S, between_s=_FOREVER_S, total_s=_FOREVER_S
            )
            session.call = Call(session, limits, automatic_credit=True)
            to = Destination(router.address, SESSION_ENDPOINT)
            try:
                await open_call(self._runtime.plane, to, Attach(session.name), session.call, _decode_moved)
            except NetworkFault:
                self._resting_until = self._loop.time() + _REST_S
                raise
            self._sessions[router.id] = session
            return session

    def forget(self, session: RouterSession) -> None:
        """It is over."""
        if self._sessions.get(session.router.id) is session:
            del self._sessions[session.router.id]

    def tell_soon(self, session: RouterSession) -> None:
        """Something is over: the next question takes it along, or it goes by itself."""
        if not session.is_telling and not self._crew.closed:
            session.is_telling = True
            session.timer = self._loop.call_later(_TELL_AFTER_S, self._start_telling, session)

    def _start_telling(self, session: RouterSession) -> None:
        session.timer = None
        if session.has_news:
            self._crew.start(self._tell(session), "news")
        else:
            session.is_telling = False

    async def _tell(self, session: RouterSession) -> None:
        """Until it is told, or there is nobody any more whom it matters to."""
        limits = Deadlines(
            connect_s=self._ask_s, first_s=self._ask_s, between_s=self._ask_s, total_s=self._ask_s
        )
        to = Destination(session.router.address, SESSION_ENDPOINT)
        try:
            while session.is_open and session.has_news:
                news = News(session.name, *session.take_news())
                try:
                    async with await open_stream(self._runtime.plane, to, news, limits) as stream:
                        await anext(stream, None)
                except KvoltError as error:
                    log.debug("the router cannot be told what is over: %s", error.message)
                    if session.is_open:
                        session.put_back(news)
                        await asyncio.sleep(_RETRY_S)
        finally:
            session.is_telling = False


class RemoteRouter:
    """The Router port for one component, decided by the router process; by `local` while there is none."""

    forecast: Callable[[Request], Forecast]
    """Where `local` can: of load, which it hears of. Of KV it knows what it has routed itself, so that a prompt which
    lies at a worker counts as one that is to be computed."""

    def __init__(
        self,
        link: RouterLink,
        client: EndpointClient,
        local: Router,
        block_size: int = 0,
        role: Role = Role.AGGREGATED,
    ) -> None:
        self._link = link
        self._client = client
        self._local = local
        self._block_size = block_size
        self._role = role
        if isinstance(local, Forecasting):
            self.forecast = local.forecast
        self._endpoint = str(client.endpoint)
        self._found: tuple[list[Instance], dict[InstanceId, Instance]] = ([], {})
        """The candidates, and the same by id."""
        self._num_booked = 0
        self._booked: dict[int, Asked | Decision] = {}
        """By our own number: what the router process has decided, or `local` has."""

    @property
    def num_under_way(self) -> int:
        return len(self._booked)

    async def explain(self, request: Request) -> Explanation:
        """What the router process would do with a request; what we would alone, while there is none."""
        told = await self._link.explain(self._question(request, frozenset()))
        return told or explain_route(self._local, request, "this frontend, while no router answers")

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        left_out = excluded
        for _ in range(_MAX_ASKS):
            asked = await self._link.ask(self._question(request, left_out))
            if asked is None:
                break
            answer = asked.answer
            if answer.refused is not None:
                error = from_info(answer.refused)
                if not isinstance(error, Unavailable):
                    raise error
                if answer.refused.fields.get("reason") == "no_session":
                    asked.session.close()
                    continue
                break  # it knows nobody; we may have heard of somebody already
            instance = self._find(answer.instance)
            if instance is not None:
                return self._carry(instance, asked)
            # Lost to us and not yet to the router, or known to it and not yet to us.
            asked.free(None)
            self._link.stats.fallbacks["unusable_instance"] += 1
            left_out = left_out | self._unusable() | {answer.instance or InstanceId("")}
        decision = await self._local.route(request, excluded)
        # Not to be moved by `local`: that would be told in its numbers, not in ours.
        return self._book(msgspec.structs.replace(decision, recall=None), decision)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        match self._booked.get(decision.booking):
            case Asked() as asked:
                asked.begin(cached_tokens)
            case Decision() as own:
                self._local.begun(own, cached_tokens)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        match self._booked.pop(decision.booking, None):
            case Asked() as asked:
                asked.free(usage, outcome)
            case Decision() as own:
                self._local.free(own, usage, outcome)

    async def close(self) -> None:
        """The way to who is asked is shared."""
        await self._local.close()

    def move(self, decision: Decision, asked: Asked) -> None:
        """The router process would have it elsewhere."""
        recall = decision.recall
        instance = self._find(asked.answer.instance)
        if instance is None or recall is None or recall.move is None:
            asked.free(None)
            return
        elsewhere = self._carry(instance, asked)
        if not recall.move(elsewhere):
            self.free(elsewhere, None)

    def _question(self, request: Request, excluded: frozenset[InstanceId]) -> RouteQuestion:
        return question_of(self._endpoint, request, excluded, self._block_size, self._role)

    def _carry(self, instance: Instance, asked: Asked) -> Decision:
        answer = asked.answer
        decision = Decision(
            instance,
            answer.overlap_blocks,
            answer.predicted_ms,
            answer.kv_sources,
            dp_rank=answer.dp_rank,
            recall=Recall() if answer.can_move else None,
        )
        booked = self._book(decision, asked)
        if answer.can_move:
            asked.session.carry(asked.ticket, self, booked)
        return booked

    def _book(self, decision: Decision, behind: Asked | Decision) -> Decision:
        self._num_booked += 1
        self._booked[self._num_booked] = behind
        return msgspec.structs.replace(decision, booking=self._num_booked)

    def _find(self, instance_id: InstanceId | None) -> Instance | None:
        candidates = self._client.candidates()
        if self._found[0] is not candidates:
            self._found = (candidates, {instance.id: instance for instance in candidates})
        return None if instance_id is None else self._found[1].get(instance_id)

    def _unusable(self) -> frozenset[InstanceId]:
        usable = {instance.id for instance in self._client.candidates()}
        return frozenset(
            instance.id
            for instance in self._client.instances()
            if instance.state is InstanceState.READY and instance.id not in usable
        )
