"""SglangEngine: adapter for SGLang in the worker's process. The host process runs SGLang (`host_supervisor`).

Keeps the order of events: a step's KV changes are emitted with the step or before it, never after.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from xxhash import xxh3_64_intdigest

from kvolt.core.card import Capacity, EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import KvoltError, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Role
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS, EngineSpec
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import card_of, info_of, limits_of
from kvolt.engines.external.metrics import engine_metrics
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.host.messages import (
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
from kvolt.engines.sglang.host_supervisor import CallCommand, HostProcess, HostSupervisor, NewHost
from kvolt.engines.sglang.kv_order import KvOrder
from kvolt.engines.sglang.loras import Adapters
from kvolt.engines.sglang.outputs import choice_output, load_of
from kvolt.engines.sglang.prefills import Prefills, bootstrap_fields, check_bootstrap
from kvolt.engines.sglang.requests import check_supported, generation, rid_of
from kvolt.engines.wakeup import Wakeup
from kvolt.models.fetch_progress import ProgressLog
from kvolt.models.folder_export import folder_of
from kvolt.models.resolve import resolve
from kvolt.scheduler.step_plan import Limits

_CALL_S = 60.0
"""Timeout of loading an adapter. Clearing the cache has a setting of its own."""
_READ_S = 1.0
"""Time for the worker to read that blocks were cleared."""


@dataclass(slots=True)
class Launched:
    """A running SGLang."""

    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int
    facts: Facts


def launched_from(spec: EngineSpec, arguments: SglangArguments, model: Path, facts: Facts) -> Launched:
    """Card and registration from the facts that the host reports."""
    card = card_of(
        model,
        arguments.served_name or spec.model,
        context_length=facts.context_length,
        block_size=facts.page_size,
        extra_eos=facts.eos_token_ids,  # SGLang stops at them
    )
    features = ["KvEvents"] if facts.kv_sources else []
    features += ["Prefill"] if spec.role in (Role.PREFILL, Role.DECODE) else []
    features += ["Lora"] if facts.has_lora else []
    capacity = Capacity(
        max_num_seqs=facts.max_running_requests,
        max_batch_tokens=facts.max_batch_tokens,
        kv_total_blocks=facts.max_total_tokens // facts.page_size,  # per rank
    )
    info = info_of(
        "sglang",
        spec.role,
        card,
        capacity,
        dp_ranks=tuple(range(facts.num_ranks)),
        features=tuple(features),
        kv_events=bool(facts.kv_sources),
        loras=tuple(arguments.loras),
    )
    limits = limits_of(info, card, arguments.max_waiting)
    return Launched(card, info, limits, facts.vocab_size, facts)


class SglangEngine(ExternalEngine[Launched]):
    """See the module. For one event loop. Call `close` also after a failure."""

    name, title = "sglang", "SGLang"
    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "prompt_logprobs"}

    def __init__(
        self, spec: EngineSpec, arguments: SglangArguments, *, new_host: NewHost = HostProcess.start_host
    ) -> None:
        """`new_host`: replaced in tests."""
        super().__init__()
        self._spec = spec
        self._arguments = arguments
        self._host = HostSupervisor(new_host, self._on_batch, self._terminate)
        self._nonce = secrets.token_hex(8)
        self._adapters = Adapters(self._call_lora, self._answers.__contains__)
        self._batches: deque[Batch] = deque()
        """Batches that wait for their KV events."""
        self._wakeup = Wakeup()
        self._kv = KvOrder(self._wakeup.set)
        self._loads: dict[int, RankLoad] = {}
        self._prefills = Prefills(self._host.send)
        self._started: set[str] = set()
        """Unfinished choices with tokens, by engine id."""

    # --- life cycle

    async def _launch(self) -> Launched:
        spec, arguments = self._spec, self._arguments
        model = await asyncio.to_thread(lambda: folder_of(resolve(spec.model, ProgressLog())))
        return launched_from(spec, arguments, model, await self._host.start(spec, arguments, model))

    async def _start_tasks(self, running: Launched) -> None:
        facts = running.facts
        self._adapters.update(self._arguments.loras)  # SGLang has loaded them
        self._adapters.is_enabled = facts.has_lora
        for rank, source in enumerate(facts.kv_sources):
            feed = self._kv.add(rank, source, facts.page_size)
            self._start_task(partial(self._kv.follow, rank, feed), f"KV events of rank {rank}")
        self._start_task(self._emit_steps, "steps")

    async def _shut_down(self) -> None:
        try:
            await self._host.close()
        finally:
            self._kv.close()

    def _on_end(self) -> None:
        self._host.fail_calls(self._death_error())
        self._started.clear()
        self._batches.clear()

    def metrics(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        """Metrics that SGLang's processes write to a folder, if enabled."""
        folder = self._launched.facts.metrics_folder
        return iter(()) if folder is None else engine_metrics("sglang:", labels, folder)

    # --- steps

    async def _emit_steps(self) -> None:
        """Emit batches in order, each once its KV events have arrived."""
        while True:
            while self._batches:
                batch = self._batches[0]
                await self._kv.wait_batches(batch.kv_rank, batch.kv_number)
                if not self._batches:  # ended during the await
                    return
                self._batches.popleft()
                self._add_batch(batch)
                await self._put_steps()
            await self._put_steps()
            await self._wakeup.wait()
            self._wakeup.clear()

    async def _put_steps(self) -> None:
        """Emit everything since the last call: one step for the first rank, and one per other rank with changes."""
        changes = self._kv.take()
        self._step_queue.put(self._answers.take_step(self._load_of(0), tuple(changes.pop(0, ()))))
        for rank in sorted({*changes, *(rank for rank in self._loads if rank)}):
            # The load says which rank a step belongs to.
            idle = WorkerLoad(kv_total_blocks=self._launched.info.capacity.kv_total_blocks, dp_rank=rank)
            load = self._load_of(rank) or idle
            self._step_queue.put(StepOutput(load=load, kv_changes=tuple(changes.get(rank, ()))))
        await self._step_queue.wait_for_space()  # backpressure: batches wait

    def _load_of(self, rank: int) -> WorkerLoad | None:
        """The rank's new load, if any; zero if no request is left."""
        load = self._loads.pop(rank, None)
        if load is None:
            return None
        facts = self._launched.facts
        if not self._answers.num_choices:
            load = RankLoad(rank, 0, 0, 0)
        elif facts.num_ranks == 1:  # SGLang's counts lag by some steps
            running = len(self._started)
            load = RankLoad(rank, running, self._answers.num_choices - running, load.used_tokens)
        return load_of(load, facts.page_size, self._launched.info.capacity.kv_total_blocks)

    def _on_batch(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._wakeup.set()

    def _add_batch(self, batch: Batch) -> None:
        for row in batch.rows:
            self._add_row(row)
        self._loads.update((each.rank, each) for each in batch.loads)

    def _add_row(self, row: Row) -> None:
        choice = self._answers.find(row.rid.removesuffix("."))
        if choice is None:  # aborted, or a remote prefill
            self._prefills.on_row(row)
            return
        try:
            output = choice_output(row, choice)
        except KvoltError as error:
            self._fail_request(choice.request.request_id, error)
            return
        if not (output.token_ids or output.finish):
            return
        self._answers.add_output(choice, output)
        if output.finish is None:
            self._started.add(choice.engine_id)
        elif row.finish is None:  # SGLang would continue
            self._abort_choices([choice.engine_id])
        else:
            self._started.discard(choice.engine_id)

    # --- requests

    def _check_supported(self, request: Request, running: Launched) -> None:
        check_supported(request, running.facts)
        self._adapters.find(request.lora)

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        if self._spec.role is Role.PREFILL:
            raise Unsupported("a prefill worker of SGLang does not decode", feature="submit")
        ticket = check_bootstrap(request) if self._spec.role is Role.DECODE else None
        self._adapters.add_user(request.request_id, request.lora)
        for choice in choices:
            fields = {} if ticket is None else bootstrap_fields(ticket, choice.index)
            if ticket is not None and ticket.rank is not None:
                fields["disagg_prefill_dp_rank"] = ticket.rank
            self._host.send(self._generation(choice, **fields))

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._started.discard(engine_id)
            self._host.send(Abort(f"{engine_id}."))

    def _generation(self, choice: Choice, **fields: Any) -> Generate:
        return generation(choice, self._launched.facts, self._own_seed(choice), **fields)

    def _own_seed(self, choice: Choice) -> int:
        return xxh3_64_intdigest(f"{self._nonce}/{rid_of(choice)}".encode()) >> 2

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        """Returns at once: SGLang computes the prompt when the decode worker has connected."""
        if self._spec.role is not Role.PREFILL:
            raise Unsupported("only a prefill worker of SGLang serves remote prefill", feature="prefill")
        self._check(request)
        arguments = self._arguments
        return self._prefills.start(
            request, self._launched.facts, arguments.bootstrap_host, self._generation, arguments.hold_s
        )

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)

    # --- KvEvents

    async def clear_kv(self) -> int:
        """Unavailable if the engine is not idle within `clear_s`: SGLang clears its cache only then."""
        before, timeout_s = self._kv.num_held, self._arguments.clear_s
        number = self._kv.num_cleared
        error = await self._call(lambda call: Flush(call, timeout_s), timeout_s + _CALL_S)
        if error is not None:
            raise Unavailable(f"SGLang did not clear its cache: {error}", reason="busy")
        await self._kv.wait_cleared(number)
        await self._step_queue.wait_until_read(_READ_S)
        return before

    # --- Lora

    async def load_lora(self, name: str, path: str) -> None:
        await self._adapters.load(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(name)

    def loras(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    async def _call_lora(self, command: Callable[[int], LoadLora | UnloadLora]) -> str | None:
        return await self._call(command, _CALL_S)

    async def _call(self, command: Callable[[int], CallCommand], timeout_s: float) -> str | None:
        """Call the host. Returns None, or the reason of a refusal."""
        self._check_alive()
        _ = self._launched  # raises if not started
        return await self._host.call(command, timeout_s)
