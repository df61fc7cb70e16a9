"""RemoteEngine: adapter for a running server over HTTP.

The server may become unavailable without the engine ending: its requests fail and are retried elsewhere, new ones are
refused as Unavailable, and its blocks are cleared, until it is back.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvolt.core.card import Capacity, EngineInfo, ModelCard
from kvolt.core.errors import ConfigError, EngineFailed, KvoltError, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared, KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import info_of, limits_of
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.card import card_of
from kvolt.engines.remote.dialect import Dialect, check_supported
from kvolt.engines.remote.exchange import EngineExchange, held_tokens, merge_outputs, without_cached_tokens
from kvolt.engines.remote.health_watch import HealthWatch
from kvolt.engines.remote.refusals import ENGINE, broken, refusal
from kvolt.engines.remote.server import ServerFacts, inspect
from kvolt.engines.remote.server_load import LoadEstimator, OwnLoad, ServerStats
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.vllm_dialect import VllmDialect
from kvolt.engines.wakeup import Wakeup
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.client_call import Timeouts
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.scheduler.step_plan import Limits

log = logging.getLogger(__name__)

_CLEAR_TIMEOUT_S = 30.0
_ENDPOINT = re.compile(r"tcp://[^*/\s]+:[1-9][0-9]{0,4}|ipc://[^*\s]{1,100}|inproc://[^*\s]+")
"""Endpoints that ZeroMQ can connect to. A socket path has at most 107 bytes."""


@dataclass(slots=True)
class ReachedServer:
    """A server that was reached."""

    facts: ServerFacts
    card: ModelCard
    info: EngineInfo
    limits: Limits
    dialect: Dialect
    vocab_size: None = None
    """Checked by the server."""


class RemoteEngine(ExternalEngine[ReachedServer]):
    """See the module. For one event loop."""

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
        self._server_url = ServerUrl.parse(arguments.url, arguments.api_key).of_server()
        self.url = self.title = self._server_url.text
        self._timeouts = Timeouts(arguments.first_token_timeout_s, arguments.idle_timeout_s)
        self.on_health: Callable[[str | None], None] = lambda reason: None
        """Called with a reason when the server becomes unavailable, and with None when it is back."""
        self._away: str | None = None
        self._client: HttpClient | None = None
        self._exchanges: dict[str, EngineExchange] = {}
        self._unreported: dict[str, EngineExchange] = {}
        """Exchanges with output for the next step."""
        self._own = OwnLoad()
        self._load_estimator = LoadEstimator(1, 0)
        self._last_load = WorkerLoad()
        self._held = HeldBlocks()
        self._kv_changes: list[KvChange] = []
        self._wakeup = Wakeup()
        self._kv_task: asyncio.Task[None] | None = None

    # --- life cycle

    @property
    def sampling_fields(self) -> frozenset[str]:
        return self._launched.dialect.sampling_fields

    @property
    def _server(self) -> HttpClient:
        if self._client is None:
            raise EngineFailed("the remote engine is not started", engine=ENGINE)
        return self._client

    async def _launch(self) -> ReachedServer:
        """Wait for the server and read its properties."""
        arguments = self._arguments
        self._client = HttpClient(self._server_url, connect_s=arguments.connect_timeout_s)
        facts = await self._first_facts()
        if arguments.kv_events and facts.num_ranks > 1:
            raise ConfigError(
                f"{self.url} has {facts.num_ranks} data-parallel ranks, whose KV events cannot be distinguished",
                key="kv_events",
                remedy="leave out kv_events, or start a server per rank and attach each of them",
            )
        card = card_of(facts, arguments.tokenizer)
        capacity = Capacity(
            max_num_seqs=facts.max_num_seqs,
            max_batch_tokens=facts.max_batch_tokens,
            kv_total_blocks=facts.num_blocks,
        )
        has_events = arguments.kv_events is not None
        info = info_of(ENGINE, Role.AGGREGATED, card, capacity, features=("KvEvents",), kv_events=has_events)
        dialect: Dialect = (
            VllmDialect(self.url, facts.model)
            if facts.kind == "vllm"
            else SglangDialect(self.url, card.eos_token_ids)
        )
        return ReachedServer(facts, card, info, limits_of(info, card, arguments.max_waiting), dialect)

    async def _first_facts(self) -> ServerFacts:
        arguments, server = self._arguments, self._server
        reason: str | None = None
        began_at = server.now()
        while True:
            try:
                facts = await inspect(server, arguments, self._hint)
                if reason is not None:
                    self.on_health(None)
                return facts
            except KvoltError as error:
                if isinstance(error, ConfigError) and reason is None:
                    raise  # at start only: later it may be the transient state of a starting server
                waited_s = server.now() - began_at
                limit_s = arguments.start_timeout_s
                if limit_s is not None and waited_s >= limit_s:
                    raise ConfigError(
                        f"{self.url} is not available after {waited_s:.0f} s: {error.message}",
                        key="url",
                        remedy="start the server, or set another url",
                    ) from error
                remedy = error.fields.get("remedy")
                current = error.message + (f" ({remedy})" if remedy else "")
                if current != reason:
                    reason = current
                    log.warning("waiting for server: url=%s reason=%s", self.url, reason)
                    self.on_health(reason)
            await asyncio.sleep(arguments.probe_interval_s)

    async def _start_tasks(self, running: ReachedServer) -> None:
        facts = running.facts
        self._load_estimator = LoadEstimator(facts.block_size, facts.num_blocks)
        self._last_load = self._load_estimator.load(self._own)
        self._start_kv_events()
        watch = HealthWatch(
            self._server, self._arguments, facts, self._on_stats, self._on_away, self._on_back
        )
        self._start_task(watch.run, "probes")
        self._start_task(self._emit_steps, "steps")
        log.info("server attached: url=%s kind=%s model=%s", self.url, facts.kind, facts.model)

    async def _shut_down(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _on_end(self) -> None:
        for exchange in list(self._exchanges.values()):
            self._close_exchange(exchange)

    # --- requests

    def _check_supported(self, request: Request, running: ReachedServer) -> None:
        check_supported(request)
        if self._away is not None:
            raise Unavailable(f"{self.url} is away: {self._away}", reason="server_away")

    @property
    def _num_waiting(self) -> int:
        return self._own.waiting

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        dialect = self._launched.dialect
        bodies = [dialect.body(request, choice.index) for choice in choices]
        for choice, body in zip(choices, bodies, strict=True):
            reader = dialect.reader(request, choice.index)
            num_input = len(request.token_ids) + len(request.prior_tokens_of(choice.index))
            exchange = self._exchanges[choice.engine_id] = EngineExchange(self, choice, reader, num_input)
            if not dialect.reports_cached_first and self._arguments.kv_events is not None:
                # Read now: by the first token the server has published the blocks of this prompt.
                exchange.held_tokens = held_tokens(
                    request, self._held.on_device(0), self._launched.facts.block_size
                )
            self._own.waiting += 1
            exchange.call = self._server.send(dialect.path, body, exchange, self._timeouts)

    def _has_started(self, request_id: RequestId) -> bool:
        """Whether the server has sent anything; otherwise at worst a prompt was computed in vain."""
        exchanges = [*self._exchanges.values(), *self._unreported.values()]
        own = [each for each in exchanges if each.choice.request.request_id == request_id]
        return super()._has_started(request_id) or any(each.has_started for each in own)

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            if (exchange := self._exchanges.get(engine_id)) is not None:
                self._close_exchange(exchange)
        self._wakeup.set()

    def _close_exchange(self, exchange: EngineExchange, is_answered: bool = False) -> None:
        """Stop counting an exchange and end its call. The connection of a complete answer is kept for reuse."""
        if self._exchanges.pop(exchange.choice.engine_id, None) is None:
            return
        exchange.is_over = True
        if exchange.has_started:
            self._own.running -= 1
            self._own.tokens -= exchange.num_tokens
        else:
            self._own.waiting -= 1
        if exchange.call is not None and not is_answered:
            exchange.call.abandon()

    # --- output (ExchangeOwner)

    def on_output(self, exchange: EngineExchange, output: ChoiceOutput) -> None:
        if not exchange.has_started:
            exchange.has_started = True
            self._own.waiting -= 1
            self._own.running += 1
            self._own.tokens += exchange.num_tokens
            if output.cached_tokens is None:
                output.cached_tokens = exchange.held_tokens
        exchange.num_tokens += len(output.token_ids)
        self._own.tokens += len(output.token_ids)
        exchange.output = output if exchange.output is None else merge_outputs(exchange.output, output)
        self._unreported[exchange.choice.engine_id] = exchange
        if output.finish is not None:
            self._close_exchange(exchange, exchange.is_answered)
        self._wakeup.set()

    def on_failed(self, exchange: EngineExchange, error: KvoltError) -> None:
        self._close_exchange(exchange)
        self._fail_request(exchange.choice.request.request_id, error)
        self._wakeup.set()

    async def _emit_steps(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            load = self._load_estimator.load(self._own)
            new_load = load if load != self._last_load or self._own.total else None
            changes, self._kv_changes = tuple(self._kv_changes), []
            self._add_outputs()
            step = self._answers.take_step(new_load, changes)
            if step is not None:
                self._last_load = load
                self._step_queue.put(step if self._reports_cached else without_cached_tokens(step))
                await self._step_queue.wait_for_space()  # backpressure: output is merged

    def _add_outputs(self) -> None:
        """Add all output since the last step, merged per choice."""
        unreported, self._unreported = self._unreported, {}
        for engine_id, exchange in unreported.items():
            output, exchange.output = exchange.output, None
            if output is not None and self._answers.find(engine_id) is exchange.choice:
                self._answers.add_output(exchange.choice, output)

    @property
    def _reports_cached(self) -> bool:
        return self._launched.dialect.reports_cached_first or self._arguments.kv_events is not None

    # --- the server

    def _on_stats(self, stats: ServerStats) -> None:
        has_moved = self._load_estimator.update(stats, self._own)
        # A step output counts as progress of the engine, so load alone is reported only when idle.
        if has_moved or (not self._own.total and self._load_estimator.load(self._own) != self._last_load):
            self._wakeup.set()

    def _on_away(self, reason: str, since: float) -> None:
        self._away = reason
        if self._kv_task is not None:
            self._kv_task.cancel()
            self._kv_task = None
        self._add_kv_changes((Cleared(),))
        self._load_estimator.reset()
        for exchange in list(self._exchanges.values()):
            call = exchange.call
            if call is not None and not call.is_over and call.last_byte_at <= since:
                call.fail(broken(self.url, f"is away: {reason}"))
        self._wakeup.set()
        self.on_health(reason)

    def _on_back(self) -> None:
        """The server may have been restarted: reconnect to its events."""
        self._away = None
        self._start_kv_events()
        self.on_health(None)

    # --- KvEvents

    def _start_kv_events(self) -> None:
        if self._arguments.kv_events is not None:
            self._kv_task = self._task_group.start(
                self._read_kv_events(self._arguments.kv_events), "kv-events"
            )

    async def _read_kv_events(self, endpoint: str) -> None:
        """Read events and reconnect after errors; the server is usable without them."""
        last_error = ""
        while True:
            try:
                await self._read_events(endpoint)
            except Exception as error:
                if repr(error) != last_error:
                    log.exception("KV events unavailable: url=%s", self.url)
                last_error = repr(error)
            if self._held.num_blocks:
                self._add_kv_changes((Cleared(),))
            await asyncio.sleep(self._arguments.probe_interval_s)

    async def _read_events(self, endpoint: str) -> None:
        arguments = self._arguments
        feed = KvFeed(
            self._launched.dialect.kind,
            self._launched.facts.block_size,
            endpoint,
            arguments.kv_events_replay,
            arguments.kv_events_topic,
        )
        try:
            async for changes in feed.changes():
                self._add_kv_changes(changes)
        finally:
            feed.close()

    def _add_kv_changes(self, changes: tuple[KvChange, ...]) -> None:
        self._kv_changes += self._held.deduplicate(0, changes)
        self._wakeup.set()

    async def clear_kv(self) -> int:
        num_held = self._held.num_on_device
        response = await self._server.fetch(self._launched.dialect.clear_path, _CLEAR_TIMEOUT_S, b"")
        if response.status == 404:
            raise Unsupported(
                f"{self.url} has no {self._launched.dialect.clear_path}: {self._launched.dialect.clear_remedy}",
                feature="clear_kv",
            )
        if response.status != 200:
            error = refusal(self.url, response.status, response.body)
            busy = (
                f"{self.url} did not clear its cache: {error.message} ({self._launched.dialect.clear_remedy})"
            )
            raise Unavailable(busy, reason="busy")
        return num_held


def _check_endpoint(key: str, endpoint: str | None) -> None:
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(
            f"{key} {endpoint!r} is not a valid endpoint",
            key=key,
            remedy="write tcp://HOST:PORT, with the server's host",
        )
