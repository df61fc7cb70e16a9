"""RemoteEngine: a server of others, asked over HTTP, behind the engine contract.

Owns the requests that are under way there, and the word on whether the server is there at all. A server that goes away
is no death: its requests fail so that they go on elsewhere, new ones are refused as Unavailable, its blocks are told as
gone, and all of it ends when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import (
    ConfigError,
    KvoltError,
    Overloaded,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.core.request import Request, Role
from kvolt.engines.bell import Bell
from kvolt.engines.foreign.answers import Answers, News
from kvolt.engines.foreign.kv_feed import KvFeed
from kvolt.engines.registry import EngineSpec
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.card import card_of
from kvolt.engines.remote.dialect import Dialect, check_asked
from kvolt.engines.remote.exchange import Exchange
from kvolt.engines.remote.figures import Figures, LoadBook, Own
from kvolt.engines.remote.held import HeldBlocks
from kvolt.engines.remote.http_client import HttpClient, ServerUrl, Timeouts
from kvolt.engines.remote.refusals import ENGINE, broken, refusal
from kvolt.engines.remote.server import ServerFacts, inspect
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.telling import joined, without_guess
from kvolt.engines.remote.vllm_dialect import VllmDialect
from kvolt.engines.remote.watch import Watch
from kvolt.engines.step_plan import Limits, check_request
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_CLEAR_TIMEOUT_S = 30.0


class RemoteEngine:
    """See the module. One task reads `steps`; everything else is called from the same loop."""

    def __init__(self, spec: EngineSpec, arguments: RemoteArguments) -> None:
        if spec.role is not Role.AGGREGATED:
            raise ConfigError(
                f"an attached server cannot be a {spec.role} worker",
                key="role",
                remedy="leave role aggregated",
            )
        _check_endpoint("kv_events", arguments.kv_events)
        _check_endpoint("kv_events_replay", arguments.kv_events_replay)
        self._hint = spec.model
        self._arguments = arguments
        self._where = ServerUrl.parse(arguments.url)
        self.url = self._where.text
        self._timeouts = Timeouts(arguments.first_token_timeout_s, arguments.idle_timeout_s)
        self.on_health: Callable[[str | None], None] = lambda reason: None
        """Told when the server goes away, with the reason, and with None when it is back."""
        self._away: str | None = "it was not started"
        self._card: ModelCard | None = None
        self._answers = Answers()
        self._exchanges: dict[str, Exchange] = {}
        self._unheard: dict[str, Exchange] = {}
        """Those that have something to tell with the next step."""
        self._own = Own()
        self._kv_changes: list[KvChange] = []
        self._news = Bell()
        self._crew = Crew(f"remote {self.url}")
        self._following: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def card(self) -> ModelCard:
        assert self._card is not None, "start() first"
        return self._card

    # --- life

    async def start(self) -> EngineInfo:
        """Wait for the server, and read what it is."""
        arguments = self._arguments
        self._client = HttpClient(self._where, arguments.api_key, arguments.connect_timeout_s)
        try:
            facts = await self._first_facts()
            if arguments.kv_events and facts.num_ranks > 1:
                raise ConfigError(
                    f"{self.url} has {facts.num_ranks} data-parallel ranks, whose KV events cannot be told apart here",
                    key="kv_events",
                    remedy="leave out kv_events, or start a server for each rank and attach them all",
                )
            self._card = card_of(facts, arguments.tokenizer)
        except BaseException:
            await self._client.close()
            raise
        self._prepare(facts, self._card)
        log.info("attached %s (%s) at %s", facts.model, facts.kind, self.url)
        return EngineInfo(
            engine=ENGINE,
            role=Role.AGGREGATED,
            model=facts.model,
            card=card_hash(self._card),
            block_size=facts.block_size,
            capacity=Capacity(
                max_num_seqs=facts.max_num_seqs,
                max_batch_tokens=facts.max_batch_tokens,
                kv_total_blocks=facts.num_blocks,
            ),
            features=("KvEvents",),
            kv_events=arguments.kv_events is not None,
        )

    async def _first_facts(self) -> ServerFacts:
        arguments = self._arguments
        is_told = False
        began_at = self._client.now()
        while True:
            try:
                return await inspect(self._client, arguments, self._hint)
            except KvoltError as error:
                if isinstance(error, ConfigError) and not is_told:
                    raise  # at once, where a user looks; later a server that starts may say anything
                waited_s = self._client.now() - began_at
                limit_s = arguments.start_timeout_s
                if limit_s is not None and waited_s >= limit_s:
                    raise ConfigError(
                        f"{self.url} is not there after {waited_s:.0f} s: {error.message}",
                        key="url",
                        remedy="start the server, or name another",
                    ) from error
                if not is_told:
                    is_told = True
                    log.warning("waiting for %s: %s", self.url, error.message)
            await asyncio.sleep(arguments.probe_interval_s)

    def _prepare(self, facts: ServerFacts, card: ModelCard) -> None:
        self._answers.eos_token_ids = card.eos_token_ids
        self._dialect: Dialect = (
            VllmDialect(self.url, facts.model)
            if facts.kind == "vllm"
            else SglangDialect(self.url, card.eos_token_ids)
        )
        self._book = LoadBook(facts.block_size, facts.num_blocks)
        self._told_load = self._book.load(self._own)
        self._held = HeldBlocks(facts.block_size)
        self._num_blocks = facts.num_blocks
        self._limits = Limits(
            max_num_seqs=facts.max_num_seqs,
            max_batch_tokens=facts.max_batch_tokens,
            max_waiting=self._arguments.max_waiting,
            context_length=facts.context_length,
            block_size=facts.block_size,
        )
        self._away = None
        self._follow()
        watch = Watch(self._client, self._arguments, facts, self._on_figures, self._on_away, self._on_back)
        self._crew.start(watch.run(), "watch")

    async def close(self) -> None:
        self._closed = True
        self._away = "it was closed"
        await self._crew.close()
        for exchange in list(self._exchanges.values()):
            self._leave(exchange)
        self._answers.clear()
        if self._card is not None:
            await self._client.close()
        self._news.ring()

    # --- requests

    def submit(self, request: Request) -> None:
        check_request(request, self._limits, self._num_blocks)
        check_asked(request)
        self._dialect.check(request)
        if self._away is not None:
            raise Unavailable(f"{self.url} is away: {self._away}", reason="server_away")
        if self._own.waiting + len(request.open_choices) > self._limits.max_waiting:
            limit = self._limits.max_waiting
            raise Overloaded(f"too much waits at {self.url}", queue="engine", limit=limit)
        bodies = {index: self._dialect.body(request, index) for index in request.open_choices}
        for choice in self._answers.open(request):
            reader = self._dialect.reader(request, choice.index)
            num_given = len(request.token_ids) + len(request.resumed(choice.index))
            exchange = self._exchanges[choice.engine_id] = Exchange(self, choice, reader, num_given)
            if not self._dialect.tells_cached_first and self._arguments.kv_events is not None:
                # Now: when the first token is there the server has told of the prompt's own blocks.
                exchange.held_tokens = self._held.cached_tokens(request)
            self._own.waiting += 1
            path = self._dialect.path
            exchange.call = self._client.send(path, bodies[choice.index], exchange, self._timeouts)

    def abort(self, request_id: RequestId) -> None:
        self._stop(self._answers.close(request_id))

    async def withdraw(self, request_id: RequestId) -> bool:
        """As long as the server has said nothing of it: at worst a prompt was computed for nothing."""
        known = [*self._exchanges.values(), *self._unheard.values()]
        mine = [each for each in known if each.choice.request.request_id == request_id]
        if request_id not in self._answers or any(exchange.has_begun for exchange in mine):
            return False
        self.abort(request_id)
        return True

    def _stop(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            if (exchange := self._exchanges.get(engine_id)) is not None:
                self._leave(exchange)
        if engine_ids:
            self._news.ring()

    def _leave(self, exchange: Exchange, is_answered: bool = False) -> None:
        """Nothing of it counts any more. A connection whose answer has come ends by itself, and is used again."""
        if self._exchanges.pop(exchange.choice.engine_id, None) is None:
            return
        exchange.is_over = True
        if exchange.has_begun:
            self._own.running -= 1
            self._own.tokens -= exchange.num_tokens
        else:
            self._own.waiting -= 1
        if exchange.call is not None and not is_answered:
            exchange.call.give_up()

    # --- what comes (Teller)

    def heard(self, exchange: Exchange, news: News) -> None:
        if not exchange.has_begun:
            exchange.has_begun = True
            self._own.waiting -= 1
            self._own.running += 1
            self._own.tokens += exchange.num_tokens
            if news.cached_tokens is None:
                news.cached_tokens = exchange.held_tokens
        exchange.num_tokens += len(news.token_ids)
        self._own.tokens += len(news.token_ids)
        exchange.news = news if exchange.news is None else joined(exchange.news, news)
        self._unheard[exchange.choice.engine_id] = exchange
        if news.finish is not None:
            self._leave(exchange, exchange.is_answered)
        self._news.ring()

    def failed(self, exchange: Exchange, error: KvoltError) -> None:
        self._leave(exchange)
        self._stop(self._answers.fail(exchange.choice.request.request_id, error))
        self._news.ring()

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._closed:
            await self._news.wait()
            self._news.silence()
            load = self._book.load(self._own)
            told = load if load != self._told_load or self._own.total else None
            changes, self._kv_changes = tuple(self._kv_changes), []
            self._tell()
            step = self._answers.take(told, changes)
            if step is not None:
                self._told_load = load
                yield step if self._knows_cached else without_guess(step)

    def _tell(self) -> None:
        """All that came since the last step, once for each choice: several chunks of one may come in one read."""
        unheard, self._unheard = self._unheard, {}
        for engine_id, exchange in unheard.items():
            news, exchange.news = exchange.news, None
            if news is not None and self._answers.find(engine_id) is exchange.choice:
                self._answers.tell(exchange.choice, news)

    @property
    def _knows_cached(self) -> bool:
        return self._dialect.tells_cached_first or self._arguments.kv_events is not None

    # --- the server

    def _on_figures(self, figures: Figures) -> None:
        has_moved = self._book.look(figures, self._own)
        # A step stands for progress: one with nothing but a load must not hide that none is made.
        if has_moved or (not self._own.total and self._book.load(self._own) != self._told_load):
            self._news.ring()

    def _on_away(self, reason: str, since: float) -> None:
        self._away = reason
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self._held.apply((Cleared(),))
        self._kv_changes.append(Cleared())
        self._book.forget()
        for exchange in list(self._exchanges.values()):
            call = exchange.call
            if call is not None and not call.is_over and call.last_byte_at <= since:
                call.fail(broken(self.url, f"is away: {reason}"))
        self._news.ring()
        self.on_health(reason)

    def _on_back(self) -> None:
        """Another process, perhaps: its events count from the start."""
        self._away = None
        self._follow()
        self.on_health(None)

    # --- KvEvents

    def _follow(self) -> None:
        if self._arguments.kv_events is not None:
            self._following = self._crew.start(self._follow_events(self._arguments.kv_events), "kv-events")

    async def _follow_events(self, endpoint: str) -> None:
        arguments = self._arguments
        feed = KvFeed(
            self._dialect.kind,
            self._limits.block_size,
            endpoint,
            arguments.kv_events_replay,
            arguments.kv_events_topic,
        )
        try:
            async for changes in feed.changes():
                self._held.apply(changes)
                self._kv_changes += changes
                self._news.ring()
        finally:
            feed.close()

    async def clear_kv(self) -> int:
        num_held = len(self._held)
        found = await self._client.fetch(self._dialect.clear_path, _CLEAR_TIMEOUT_S, b"")
        if found.status == 404:
            raise Unsupported(
                f"{self.url} has no {self._dialect.clear_path}: {self._dialect.clear_remedy}",
                feature="clear_kv",
            )
        if found.status != 200:
            error = refusal(self.url, found.status, found.body)
            busy = f"{self.url} does not clear its cache: {error.message} ({self._dialect.clear_remedy})"
            raise Unavailable(busy, reason="busy")
        return num_held


def _check_endpoint(key: str, endpoint: str | None) -> None:
    if endpoint is None:
        return
    is_address = endpoint.startswith(("tcp://", "ipc://", "inproc://"))
    if not is_address or "*" in endpoint:
        raise ConfigError(
            f"{key} {endpoint!r} is nowhere to connect to",
            key=key,
            remedy="write tcp://HOST:PORT, with the server's host",
        )
