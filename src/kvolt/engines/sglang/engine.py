"""SglangEngine: the Engine of the contract, in the worker's process. What computes is in the host (`host_life`).

Owns the requests that SGLang has (in `Answers`) and the order of what is told: a step's KV changes are told with it
or before it, never after.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from xxhash import xxh3_64_intdigest

from kvolt.core.delta import StepOutput
from kvolt.core.errors import KvoltError, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.metrics import engine_metrics
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.described import Described, describe
from kvolt.engines.sglang.host.messages import (
    Abort,
    Batch,
    Flush,
    Generate,
    LoadLora,
    RankLoad,
    Row,
    UnloadLora,
)
from kvolt.engines.sglang.host_life import CallCommand, HostLife
from kvolt.engines.sglang.kv_order import KvOrder
from kvolt.engines.sglang.loras import Adapters
from kvolt.engines.sglang.outputs import load_of, news_of
from kvolt.engines.sglang.prefills import Prefills, check_meeting, meeting
from kvolt.engines.sglang.process import HostProcess, NewHost
from kvolt.engines.sglang.requests import check_supported, generation, rid_of
from kvolt.engines.wakeup import Wakeup
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve

_CALL_S = 60.0
"""For an adapter to be loaded; forgetting blocks has a time of its own."""
_TOLD_S = 1.0
"""For who reads the steps to hear that blocks are gone."""


class SglangEngine(ExternalEngine[Described]):
    """See the module. For one loop. `close` it, also after it died."""

    name, title = "sglang", "SGLang"

    def __init__(
        self, spec: EngineSpec, arguments: SglangArguments, *, new_host: NewHost = HostProcess.start
    ) -> None:
        """`new_host`: tests have others."""
        super().__init__()
        self._spec = spec
        self._arguments = arguments
        self._host = HostLife(new_host, self._on_batch, self._end)
        self._nonce = secrets.token_hex(8)
        self._adapters = Adapters(self._ask_lora, self._answers.__contains__)
        self._batches: deque[Batch] = deque()
        """Not told yet: their KV events are still on their way."""
        self._news = Wakeup()
        self._kv = KvOrder(self._news.ring)
        self._loads: dict[int, RankLoad] = {}
        self._prefills = Prefills(self._host.send)
        self._begun: set[str] = set()
        """Choices that have tokens and are not over, by their names in SGLang."""

    # --- life

    async def _launch(self) -> Described:
        spec, arguments = self._spec, self._arguments
        model = await asyncio.to_thread(lambda: folder_of(resolve(spec.model, ProgressLog())))
        return describe(spec, arguments, model, await self._host.start(spec, arguments, model))

    async def _begin(self, running: Described) -> None:
        facts = running.facts
        self._adapters.begin(self._arguments.loras, facts.has_lora)
        for rank, source in enumerate(facts.kv_sources):
            feed = self._kv.add(rank, source, facts.page_size)
            self._go_on(partial(self._kv.follow, rank, feed), f"KV events of rank {rank}")
        self._go_on(self._pump, "steps")

    async def _shut_down(self) -> None:
        try:
            await self._host.close()
        finally:
            self._kv.close()

    def _on_end(self) -> None:
        self._host.end(self._death())
        self._begun.clear()
        self._batches.clear()

    def metrics(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        """SGLang's processes keep what they count in a folder, where they were told to count."""
        folder = self._known.facts.metrics_folder
        return iter(()) if folder is None else engine_metrics("sglang:", labels, folder)

    # --- steps

    async def _pump(self) -> None:
        """One batch at a time, each once the KV events that belong to it are here."""
        while True:
            while self._batches:
                batch = self._batches[0]
                await self._kv.reached(batch.kv_rank, batch.kv_number)
                if not self._batches:  # it has ended meanwhile
                    return
                self._batches.popleft()
                self._tell(batch)
                await self._put()
            await self._put()
            await self._news.wait()
            self._news.silence()

    async def _put(self) -> None:
        """All that was told since the last time: the first rank's in one step, others' KV changes in their own."""
        changes = self._kv.take()
        self._unread.put(self._answers.take(self._load_of(0), tuple(changes.pop(0, ()))))
        for rank in sorted({*changes, *(rank for rank in self._loads if rank)}):
            # A step is of the rank that its load names.
            nothing = WorkerLoad(kv_total_blocks=self._known.info.capacity.kv_total_blocks, dp_rank=rank)
            load = self._load_of(rank) or nothing
            self._unread.put(StepOutput(load=load, kv_changes=tuple(changes.get(rank, ()))))
        await self._unread.room()  # while nobody reads, batches wait

    def _load_of(self, rank: int) -> WorkerLoad | None:
        """What the rank has told last; where nothing is left to compute, that nothing is held."""
        told = self._loads.pop(rank, None)
        if told is None:
            return None
        facts = self._known.facts
        if not self._answers.num_choices:
            told = RankLoad(rank, 0, 0, 0)
        elif facts.num_ranks == 1:  # its own figures are those of some steps ago
            running = len(self._begun)
            told = RankLoad(rank, running, self._answers.num_choices - running, told.used_tokens)
        return load_of(told, facts.page_size, self._known.info.capacity.kv_total_blocks)

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
            self._give_up(choice.request.request_id, error)
            return
        if not (news.token_ids or news.finish):
            return
        self._answers.tell(choice, news)
        if news.finish is None:
            self._begun.add(choice.engine_id)
        elif row.finish is None:  # SGLang does not know that it is over
            self._drop([choice.engine_id])
        else:
            self._begun.discard(choice.engine_id)

    # --- requests

    def _check_own(self, request: Request, running: Described) -> None:
        check_supported(request, running.facts)
        self._adapters.check(request.lora)

    def _hand_over(self, request: Request, choices: list[Choice]) -> None:
        if self._spec.role is Role.PREFILL:
            raise Unsupported("a prefill worker of SGLang answers nobody", feature="submit")
        ticket = check_meeting(request) if self._spec.role is Role.DECODE else None
        self._adapters.use(request.request_id, request.lora)
        for choice in choices:
            met = {} if ticket is None else meeting(ticket, choice.index)
            if ticket is not None and ticket.rank is not None:
                met["disagg_prefill_dp_rank"] = ticket.rank
            self._host.send(self._generation(choice, **met))

    def _drop(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._begun.discard(engine_id)
            self._host.send(Abort(f"{engine_id}."))

    def _generation(self, choice: Choice, **fields: Any) -> Generate:
        return generation(choice, self._known.facts, self._own_seed(choice), **fields)

    def _own_seed(self, choice: Choice) -> int:
        return xxh3_64_intdigest(f"{self._nonce}/{rid_of(choice)}".encode()) >> 2

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
            request, self._known.facts, arguments.bootstrap_host, self._generation, arguments.hold_s
        )

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)

    # --- KvEvents

    async def clear_kv(self) -> int:
        """Unavailable where there is no moment without requests in the time given."""
        before, timeout_s = self._kv.num_held, self._arguments.clear_s
        number = self._kv.num_cleared
        error = await self._call(lambda call: Flush(call, timeout_s), timeout_s + _CALL_S)
        if error is not None:
            raise Unavailable(f"SGLang did not forget its blocks: {error}", reason="busy")
        await self._kv.cleared_since(number)
        await self._unread.read_up(_TOLD_S)
        return before

    # --- Lora

    async def load_lora(self, name: str, path: str) -> None:
        await self._adapters.load(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(name)

    def loras(self) -> tuple[str, ...]:
        return self._adapters.names

    async def _ask_lora(self, command: Callable[[int], LoadLora | UnloadLora]) -> str | None:
        return await self._call(command, _CALL_S)

    async def _call(self, command: Callable[[int], CallCommand], timeout_s: float) -> str | None:
        """None, or why it was refused."""
        self._check_alive()
        _ = self._known  # it is started
        return await self._host.call(command, timeout_s)
