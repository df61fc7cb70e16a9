"""RemoteEngine: a server of others, asked over HTTP, behind the engine contract.

Owns the requests that are under way there, and the word on whether the server is there at all. A server that goes away
is no death: its requests fail so that they go on elsewhere, new ones are refused as Unavailable, its blocks are told as
gone, and all of it ends when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.errors import ConfigError, EngineFailed, KvoltError, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import limits_of
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.card import card_of
from kvolt.engines.remote.dialect import Dialect, check_asked
from kvolt.engines.remote.exchange import Exchange
from kvolt.engines.remote.figures import Figures, LoadBook, Own
from kvolt.engines.remote.refusals import ENGINE, broken, refusal
from kvolt.engines.remote.server import ServerFacts, inspect
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.telling import held_tokens, joined, without_guess
from kvolt.engines.remote.vllm_dialect import VllmDialect
from kvolt.engines.remote.watch import Watch
from kvolt.engines.wakeup import Wakeup
from kvolt.runtime.http.client import HttpClient, ServerUrl, Timeouts
from kvolt.scheduler.step_plan import Limits

log = logging.getLogger(__name__)

_CLEAR_TIMEOUT_S = 30.0
_ENDPOINT = re.compile(r"tcp://[^*/\s]+:[1-9][0-9]{0,4}|ipc://[^*\s]{1,100}|inproc://[^*\s]+")
"""That ZeroMQ can connect to. The path of a socket has 107 bytes."""


@dataclass(slots=True)
class Attached:
    """A server that was there."""

    facts: ServerFacts
    card: ModelCard
    info: EngineInfo
    limits: Limits
    dialect: Dialect
    vocab_size: None = None
    """It knows best which tokens it has."""


class RemoteEngine(ExternalEngine[Attached]):
    """See the module. One task reads `steps`; everything else is called from the same loop."""

    name = ENGINE

    def __init__(self, spec: EngineSpec, arguments: RemoteArguments) -> None:
        if spec.role is not Role.AGGREGATED:
            raise ConfigError(
                f"an attached server cannot be a {spec.role} worker",
                key="role",
                remedy="leave role aggregated",
            )
        _check_endpoint("kv_events", arguments.kv_events)
        _check_endpoint("kv_events_replay", arguments.kv_events_replay)
        super().__init__()
        self._hint = spec.model
        self._arguments = arguments
        self._where = ServerUrl.parse(arguments.url)
        self.url = self.title = self._where.text
        self._timeouts = Timeouts(arguments.first_token_timeout_s, arguments.idle_timeout_s)
        self.on_health: Callable[[str | None], None] = lambda reason: None
        """Told when the server goes away, with the reason, and with None when it is back."""
        self._away: str | None = None
        self._client: HttpClient | None = None
        self._exchanges: dict[str, Exchange] = {}
        self._unheard: dict[str, Exchange] = {}
        """Those that have something to tell with the next step."""
        self._own = Own()
        self._book = LoadBook(1, 0)
        self._told_load = WorkerLoad()
        self._held = HeldBlocks()
        self._kv_changes: list[KvChange] = []
        self._news = Wakeup()
        self._following: asyncio.Task[None] | None = None

    # --- life

    @property
    def _server(self) -> HttpClient:
        if self._client is None:
            raise EngineFailed("the remote engine is not started", engine=ENGINE)
        return self._client

    async def _launch(self) -> Attached:
        """Wait for the server, and read what it is."""
        arguments = self._arguments
        broke = partial(broken, self.url)
        self._client = HttpClient(self._where, arguments.api_key, arguments.connect_timeout_s, broke)
        facts = await self._first_facts()
        if arguments.kv_events and facts.num_ranks > 1:
            raise ConfigError(
                f"{self.url} has {facts.num_ranks} data-parallel ranks, whose KV events cannot be told apart here",
                key="kv_events",
                remedy="leave out kv_events, or start a server for each rank and attach them all",
            )
        card = card_of(facts, arguments.tokenizer)
        info = EngineInfo(
            engine=ENGINE,
            role=Role.AGGREGATED,
            model=facts.model,
            card=card_hash(card),
            block_size=facts.block_size,
            capacity=Capacity(
                max_num_seqs=facts.max_num_seqs,
                max_batch_tokens=facts.max_batch_tokens,
                kv_total_blocks=facts.num_blocks,
            ),
            features=("KvEvents",),
            kv_events=arguments.kv_events is not None,
        )
        dialect: Dialect = (
            VllmDialect(self.url, facts.model)
            if facts.kind == "vllm"
            else SglangDialect(self.url, card.eos_token_ids)
        )
        return Attached(facts, card, info, limits_of(info, card, arguments.max_waiting), dialect)

    async def _first_facts(self) -> ServerFacts:
        arguments, server = self._arguments, self._server
        is_told = False
        began_at = server.now()
        while True:
            try:
                return await inspect(server, arguments, self._hint)
            except KvoltError as error:
                if isinstance(error, ConfigError) and not is_told:
                    raise  # at once, where a user looks; later a server that starts may say anything
                waited_s = server.now() - began_at
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

    async def _begin(self, running: Attached) -> None:
        facts = running.facts
        self._book = LoadBook(facts.block_size, facts.num_blocks)
        self._told_load = self._book.load(self._own)
        self._follow()
        watch = Watch(self._server, self._arguments, facts, self._on_figures, self._on_away, self._on_back)
        self._go_on(watch.run, "probes")
        self._go_on(self._pump, "steps")
        log.info("attached %s (%s) at %s", facts.model, facts.kind, self.url)

    async def _shut_down(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _on_end(self) -> None:
        for exchange in list(self._exchanges.values()):
            self._leave(exchange)

    # --- requests

    def _check_own(self, request: Request, running: Attached) -> None:
        check_asked(request)
        running.dialect.check(request)
        if self._away is not None:
            raise Unavailable(f"{self.url} is away: {self._away}", reason="server_away")

    @property
    def _num_waiting(self) -> int:
        return self._own.waiting

    def _hand_over(self, request: Request, choices: list[Choice]) -> None:
        dialect = self._known.dialect
        bodies = [dialect.body(request, choice.index) for choice in choices]
        for choice, body in zip(choices, bodies, strict=True):
            reader = dialect.reader(request, choice.index)
            num_given = len(request.token_ids) + len(request.resumed(choice.index))
            exchange = self._exchanges[choice.engine_id] = Exchange(self, choice, reader, num_given)
            if not dialect.tells_cached_first and self._arguments.kv_events is not None:
                # Now: when the first token is there the server has told of the prompt's own blocks.
                exchange.held_tokens = held_tokens(
                    request, self._held.on_device(0), self._known.facts.block_size
                )
            self._own.waiting += 1
            exchange.call = self._server.send(dialect.path, body, exchange, self._timeouts)

    def _has_begun(self, request_id: RequestId) -> bool:
        """As soon as the server has said something of it: at worst a prompt was computed for nothing."""
        known = [*self._exchanges.values(), *self._unheard.values()]
        mine = [each for each in known if each.choice.request.request_id == request_id]
        return super()._has_begun(request_id) or any(each.has_begun for each in mine)

    def _drop(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            if (exchange := self._exchanges.get(engine_id)) is not None:
                self._leave(exchange)
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
        self._give_up(exchange.choice.request.request_id, error)
        self._news.ring()

    async def _pump(self) -> None:
        while True:
            await self._news.wait()
            self._news.silence()
            load = self._book.load(self._own)
            told = load if load != self._told_load or self._own.total else None
            changes, self._kv_changes = tuple(self._kv_changes), []
            self._tell()
            step = self._answers.take(told, changes)
            if step is not None:
                self._told_load = load
                self._unread.put(step if self._knows_cached else without_guess(step))
                await self._unread.room()  # while nobody reads, what comes is gathered

    def _tell(self) -> None:
        """All that came since the last step, once for each choice: several chunks of one may come in one read."""
        unheard, self._unheard = self._unheard, {}
        for engine_id, exchange in unheard.items():
            news, exchange.news = exchange.news, None
            if news is not None and self._answers.find(engine_id) is exchange.choice:
                self._answers.tell(exchange.choice, news)

    @property
    def _knows_cached(self) -> bool:
        return self._known.dialect.tells_cached_first or self._arguments.kv_events is not None

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
        self._tell_kv((Cleared(),))
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
        """Anew after whatever goes wrong with it: without events a server can still be used."""
        told = ""
        while True:
            try:
                await self._read_events(endpoint)
            except Exception as error:
                if repr(error) != told:
                    log.exception("KV events of %s cannot be followed", self.url)
                told = repr(error)
            if self._held.num_blocks:
                self._tell_kv((Cleared(),))
            await asyncio.sleep(self._arguments.probe_interval_s)

    async def _read_events(self, endpoint: str) -> None:
        arguments = self._arguments
        feed = KvFeed(
            self._known.dialect.kind,
            self._known.facts.block_size,
            endpoint,
            arguments.kv_events_replay,
            arguments.kv_events_topic,
        )
        try:
            async for changes in feed.changes():
                self._tell_kv(changes)
        finally:
            feed.close()

    def _tell_kv(self, changes: tuple[KvChange, ...]) -> None:
        self._kv_changes += self._held.once(0, changes)
        self._news.ring()

    async def clear_kv(self) -> int:
        num_held = self._held.num_on_device
        found = await self._server.fetch(self._known.dialect.clear_path, _CLEAR_TIMEOUT_S, b"")
        if found.status == 404:
            raise Unsupported(
                f"{self.url} has no {self._known.dialect.clear_path}: {self._known.dialect.clear_remedy}",
                feature="clear_kv",
            )
        if found.status != 200:
            error = refusal(self.url, found.status, found.body)
            busy = (
                f"{self.url} does not clear its cache: {error.message} ({self._known.dialect.clear_remedy})"
            )
            raise Unavailable(busy, reason="busy")
        return num_held


def _check_endpoint(key: str, endpoint: str | None) -> None:
    if endpoint is None:
        return
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(
            f"{key} {endpoint!r} is nowhere to connect to",
            key=key,
            remedy="write tcp://HOST:PORT, with the server's host",
        )
