"""SglangEngine: the Engine of the contract, in the worker's process. What computes is in the host (`host_life`).

Owns the requests that SGLang has (in `Answers`) and the order of what is told: a step's KV changes are told with it
or before it, never after.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from xxhash import xxh3_64_intdigest

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineFailed, KvoltError, Overloaded, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Role
from kvolt.engines.bell import Bell
from kvolt.engines.foreign.answers import Answers, Choice
from kvolt.engines.foreign.description import limits_of
from kvolt.engines.foreign.metrics import engine_metrics
from kvolt.engines.models.fetch_progress import ProgressLog
from kvolt.engines.models.folder_export import folder_of
from kvolt.engines.models.resolve import resolve
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.described import card_of, info_of
from kvolt.engines.sglang.host_life import HostLife
from kvolt.engines.sglang.kv_order import KvOrder
from kvolt.engines.sglang.loras import Adapters
from kvolt.engines.sglang.messages import (
    Abort,
    Batch,
    Facts,
    Flush,
    Generate,
    LoadLora,
    RankLoad,
    Row,
    UnloadLora,
)
from kvolt.engines.sglang.outputs import load_of, news_of
from kvolt.engines.sglang.prefills import Prefills, check_meeting, meeting
from kvolt.engines.sglang.process import HostProcess, NewHost
from kvolt.engines.sglang.requests import check_supported, generation, rid_of
from kvolt.engines.step_plan import Limits, check_request
from kvolt.runtime.tasks import Crew

_CALL_S = 60.0
"""For an adapter to be loaded; forgetting blocks has a time of its own."""


class SglangEngine:
    """See the module. For one loop. `close` it, also after it died."""

    def __init__(
        self, spec: EngineSpec, arguments: SglangArguments, *, new_host: NewHost = HostProcess.start
    ) -> None:
        """`new_host`: tests have others."""
        self._spec = spec
        self._arguments = arguments
        self._life = HostLife(new_host, self._on_batch, self._on_end)
        self._is_started = False
        self._facts: Facts | None = None
        self._card: ModelCard | None = None
        self._num_blocks = 0
        self._limits: Limits | None = None
        self._nonce = secrets.token_hex(8)
        self._answers = Answers()
        self._adapters = Adapters(self._ask_lora, self._answers.__contains__)
        self._batches: deque[Batch] = deque()
        """Not told yet: nobody asked for them, or their KV events are still on their way."""
        self._news = Bell()
        self._kv = KvOrder(self._news.ring)
        self._loads: dict[int, RankLoad] = {}
        self._prefills = Prefills(self._life.send)
        self._begun: set[str] = set()
        """Choices that have tokens and are not over, by their names in SGLang."""
        self._crew = Crew("sglang-engine", self._life.fail)
        self._closed: asyncio.Event | None = None
        """There from the first `close` on, and set at its end."""

    # --- life

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineFailed("the sglang engine knows its model once it is started", engine="sglang")
        return self._card

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            raise EngineFailed("the sglang engine is not started", engine="sglang")
        return self._facts

    @property
    def metrics_folder(self) -> Path | None:
        """Where SGLang's processes keep what they count, `sglang:*`: for prometheus_client's MultiProcessCollector."""
        folder = self.facts.metrics_folder
        return None if folder is None else Path(folder)

    def metrics(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        folder = self.metrics_folder
        return iter(()) if folder is None else engine_metrics("sglang:", labels, str(folder))

    async def start(self) -> EngineInfo:
        """Errors of loading as they were raised. Takes as long as loading takes; cancelled, it leaves nothing."""
        if self._is_started or self._life.is_over:
            raise EngineFailed("an sglang engine is started once", engine="sglang")
        self._is_started = True
        try:
            model = await asyncio.to_thread(lambda: folder_of(resolve(self._spec.model, ProgressLog())))
            facts = await self._life.start(self._spec, self._arguments, model)
            return self._describe(model, facts)
        except BaseException:
            await self.close()
            raise

    def _describe(self, model: Path, facts: Facts) -> EngineInfo:
        self._facts = facts
        self._card = card_of(self._spec, self._arguments, model, facts)
        self._answers.eos_token_ids = frozenset(self._card.eos_token_ids)
        self._adapters.begin(self._arguments.loras, facts.has_lora)
        info = info_of(self._spec, self._arguments, self._card, facts)
        self._num_blocks = info.capacity.kv_total_blocks
        self._limits = limits_of(info, self._card, self._arguments.max_waiting)
        for rank, source in enumerate(facts.kv_sources):
            feed = self._kv.add(rank, source, facts.page_size)
            self._crew.start(self._kv.follow(rank, feed), f"KV events of rank {rank}")
        return info

    async def steps(self) -> AsyncIterator[StepOutput]:
        """One batch at a time, each once the KV events that belong to it are here."""
        while True:
            while self._batches:
                batch = self._batches[0]
                await self._kv.reached(batch.kv_rank, batch.kv_number)
                if not self._batches:  # it has ended meanwhile
                    break
                self._batches.popleft()
                self._tell(batch)
                for step in self._take():
                    yield step
            for step in self._take():
                yield step
            if self._life.failure is not None:
                raise self._life.failure
            if self._life.is_over:
                return
            await self._news.wait()
            self._news.silence()

    def _take(self) -> list[StepOutput]:
        """All that was told since the last time: the first rank's in one step, others' KV changes in their own."""
        changes = self._kv.take()
        step = self._answers.take(self._load(0), tuple(changes.pop(0, ())))
        steps = [] if step is None else [step]
        for rank in sorted({*changes, *(rank for rank in self._loads if rank)}):
            # A step is of the rank that its load names.
            load = self._load(rank) or WorkerLoad(kv_total_blocks=self._num_blocks, dp_rank=rank)
            steps.append(StepOutput(load=load, kv_changes=tuple(changes.get(rank, ()))))
        return steps

    def _load(self, rank: int) -> WorkerLoad | None:
        """What the rank has told last; where nothing is left to compute, that nothing is held."""
        told = self._loads.pop(rank, None)
        if told is None:
            return None
        if not self._answers.num_choices:
            told = RankLoad(rank, 0, 0, 0)
        elif self.facts.num_ranks == 1:  # its own figures are those of some steps ago
            running = len(self._begun)
            told = RankLoad(rank, running, self._answers.num_choices - running, told.used_tokens)
        return load_of(told, self.facts.page_size, self._num_blocks)

    async def close(self) -> None:
        if self._closed is not None:
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        try:
            await self._life.close()
        finally:
            await self._crew.close()
            self._kv.close()
            self._closed.set()

    def _on_end(self) -> None:
        """Nothing is computed any more."""
        self._answers.clear()
        self._begun.clear()
        self._batches.clear()
        self._news.ring()

    # --- what the host says

    def _on_batch(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._news.ring()

    def _tell(self, batch: Batch) -> None:
        for row in batch.rows:
            self._tell_row(row)
        self._loads.update((each.rank, each) for each in batch.loads)

    def _tell_row(self, row: Row) -> None:
        choice = self._answers.find(row.rid.removesuffix("."))
        if choice is None:  # nobody waits for it any more, or it is computed for others
            self._prefills.take(row)
            return
        try:
            news = news_of(row, choice)
        except KvoltError as error:
            self._abort(self._answers.fail(choice.request.request_id, error))
            return
        if not (news.token_ids or news.finish):
            return
        self._answers.tell(choice, news)
        if news.finish is None:
            self._begun.add(choice.engine_id)
        else:
            self._begun.discard(choice.engine_id)
            if row.finish is None:  # SGLang does not know that it is over
                self._abort([choice.engine_id])

    def _abort(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._begun.discard(engine_id)
            self._life.send(Abort(f"{engine_id}."))

    # --- requests

    def submit(self, request: Request) -> None:
        if self._spec.role is Role.PREFILL:
            raise Unsupported("a prefill worker of SGLang answers nobody", feature="submit")
        self._check(request)
        ticket = check_meeting(request) if self._spec.role is Role.DECODE else None
        choices = self._answers.open(request)
        self._adapters.use(request.request_id, request.lora)
        for choice in choices:
            met = {} if ticket is None else meeting(ticket, choice.index)
            if ticket is not None and ticket.rank is not None:
                met["disagg_prefill_dp_rank"] = ticket.rank
            self._life.send(self._generation(choice, **met))

    def _generation(self, choice: Choice, **fields: Any) -> Generate:
        return generation(choice, self.facts, self._own_seed(choice), **fields)

    def _own_seed(self, choice: Choice) -> int:
        return xxh3_64_intdigest(f"{self._nonce}/{rid_of(choice)}".encode()) >> 2

    def _check(self, request: Request) -> None:
        self._life.check()
        facts = self.facts
        assert self._limits is not None
        check_request(request, self._limits, self._num_blocks)
        check_supported(request, facts)
        self._adapters.check(request.lora)
        limit = self._arguments.max_waiting
        if self._answers.num_choices - facts.max_running_requests * facts.num_ranks >= limit:
            raise Overloaded("the engine's queue is full", queue="engine", limit=limit)

    def abort(self, request_id: RequestId) -> None:
        self._abort(self._answers.close(request_id))

    async def withdraw(self, request_id: RequestId) -> bool:
        """One that has said nothing is taken back, wherever it is: nobody has heard of what it may have computed."""
        if request_id not in self._answers or self._answers.has_begun(request_id):
            return False
        self.abort(request_id)
        return True

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        """At once: SGLang computes the prompt when the other side has come for it."""
        if self._spec.role is not Role.PREFILL:
            raise Unsupported(
                "only a prefill worker of SGLang computes prompts for others", feature="prefill"
            )
        self._check(request)
        arguments = self._arguments
        return self._prefills.begin(
            request, self.facts, arguments.bootstrap_host, self._generation, arguments.hold_s
        )

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)

    # --- KvEvents

    async def clear_kv(self) -> int:
        """Unavailable where there is no moment without requests in the time given."""
        before, timeout_s = self._kv.num_held, self._arguments.clear_s
        number = self._kv.num_cleared
        error = await self._life.call(lambda call: Flush(call, timeout_s), timeout_s + _CALL_S)
        if error is not None:
            raise Unavailable(f"SGLang did not forget its blocks: {error}", reason="busy")
        await self._kv.cleared_since(number)
        return before

    # --- Lora

    async def load_lora(self, name: str, path: str) -> None:
        await self._adapters.load(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(name)

    def loras(self) -> tuple[str, ...]:
        return self._adapters.names

    async def _ask_lora(self, command: Callable[[int], LoadLora | UnloadLora]) -> str | None:
        return await self._life.call(command, _CALL_S)
