"""SimEngine: real scheduling, blocks and streaming, with step times from a model instead of computation.

Uses the scheduler, the pool and the block exchange of the native engine. Instead of a model it has answers derived
from all tokens before them, or a script (`sim.runner`, `sim.answer`, `sim.script`), and memory whose content
identifies the tokens it was computed from (`sim.kv`), so that wrong KV produces wrong text. Steps take the time of
the latency model on the running event loop.

Of the sampling parameters `seed`, `n`, `allowed_token_ids`, `logprobs` and `prompt_logprobs` are honoured, the last
two with synthetic values. Temperature, top_p, top_k, min_p, penalties and logit_bias are accepted and ignored, since
there are no logits. Grammars are not supported.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from kvolt.core.block_key import BlockKeyContext, KvBlock, KvLayout
from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import Cancelled, EngineFailed, ErrorInfo, Unsupported, from_info, to_info
from kvolt.core.hashing import token_bytes
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import (
    COMMON_SAMPLING_FIELDS,
    AttachedKv,
    EngineSpec,
    HeldKv,
    KvAllocation,
    SealedKv,
)
from kvolt.engines.kv_exchange import KvExchange
from kvolt.engines.prefills import Prefills
from kvolt.engines.sim.arguments import SimArguments, links_of, model_of, step_model_of
from kvolt.engines.sim.kv import BLOCK_BYTES, SimMemory, key_context, layout
from kvolt.engines.sim.runner import SimRunner, StepObserver
from kvolt.engines.sim.script import AnswerScripts
from kvolt.engines.sim.trace_blocks import TraceNaming
from kvolt.engines.sim.transfers import NETWORK_IN, NETWORK_OUT, SimTransfers
from kvolt.engines.wakeup import Wakeup
from kvolt.kv import BlockPool
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_output import delta_of_run, load_of
from kvolt.scheduler.step_plan import Limits, NewToken, PlainBatch, StepPlan
from kvolt.transfer.memory.slabs import Slab

__all__ = ["SimArguments", "SimEngine"]


R = TypeVar("R")

_TRACE_FEATURES = ("KvEvents", "KvAddressable", "Prefill")
"""Features with trace blocks, which have neither tokens nor content."""


class SimEngine:
    """See the module. One task reads `steps`; everything else is called from the same loop."""

    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "allowed_token_ids", "prompt_logprobs"}
    """All are accepted; the module says which have an effect."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: SimArguments,
        observer: StepObserver | None = None,
        transfers: SimTransfers | None = None,
    ) -> None:
        """Engines with the same `transfers` share its links, like engines on one machine."""
        self._spec = spec
        self._arguments = arguments
        self._observer = observer
        model = model_of(spec.model, arguments)
        self._card = model.card
        self._step_model = step_model_of(arguments)
        limits = Limits(
            max_num_seqs=arguments.max_num_seqs,
            max_batch_tokens=arguments.max_batch_tokens,
            max_waiting=arguments.max_waiting,
            context_length=arguments.context_length,
            block_size=arguments.block_size,
        )
        self._scheduler = Scheduler(
            BlockPool(arguments.kv_blocks, arguments.kv_events),
            limits,
            self._card.eos_token_ids,
            self._keys_of,
            arguments.scheduling,
            (lambda request: TraceNaming(request, arguments.block_size)) if arguments.trace_blocks else None,
        )
        memory = self._memory = SimMemory()
        self._slab: Slab | None = None
        scripts = AnswerScripts(
            model,
            arguments.answer_text,
            arguments.answer_from_prompt,
            arguments.words,
            reads_prompts=not arguments.trace_blocks,
        )
        runner_memory = None if arguments.trace_blocks else memory
        self._runner = SimRunner(scripts, runner_memory, self._card.name, arguments.block_size)
        self._exchange = KvExchange(self._scheduler, memory, BLOCK_BYTES)
        self._own_transfers = SimTransfers(links_of(arguments), _now)
        self._transfers = transfers or self._own_transfers
        self._prefills = Prefills(self._scheduler, self._drop, _now, arguments.hold_s)
        self._plain = PlainBatch()
        self._reported_load = load_of(self._scheduler)
        self._in_flight: StepPlan | None = None
        self._ends_at: float | None = None
        """Scheduled end of the latest step; None if the next one does not follow immediately."""
        self._expiry: asyncio.TimerHandle | None = None
        self._work = Wakeup()
        """Set by every change that may allow a step or must be reported."""
        self._is_closed = False

    def _keys_of(self, request: Request) -> BlockKeyContext:
        return key_context(self._card.name, self._arguments.block_size, request)

    @property
    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> EngineInfo:
        arguments, model = self._arguments, self._step_model
        return EngineInfo(
            engine="sim",
            role=self._spec.role,
            model=self._card.name,
            card=card_hash(self._card),
            block_size=arguments.block_size,
            capacity=Capacity(
                max_num_seqs=arguments.max_num_seqs,
                max_batch_tokens=arguments.max_batch_tokens,
                kv_total_blocks=arguments.kv_blocks,
            ),
            kv_layout=None if arguments.trace_blocks else self.kv_layout().name,
            features=_TRACE_FEATURES if arguments.trace_blocks else (),
            kv_events=arguments.kv_events,
            latency=model if isinstance(model, LatencyModel) else None,
            occupancy_latency=model if isinstance(model, OccupancyModel) else None,
        )

    def load(self) -> WorkerLoad:
        """The current load."""
        return load_of(self._scheduler)

    def submit(self, request: Request) -> None:
        self._add(request, keep_blocks=False)

    def _add(self, request: Request, keep_blocks: bool) -> None:
        if self._is_closed:
            raise EngineFailed("the engine is closed", engine="sim")
        if request.grammar is not None:
            raise Unsupported("the sim engine has no grammars", feature="grammar")
        if request.extra.get("logits_processors"):
            raise Unsupported("the sim engine has no logits processors", feature="logits_processors")
        _check_tokens(request)
        self._scheduler.add_request(request, keep_blocks=keep_blocks)
        try:
            self._runner.add(request)
        except BaseException:
            self._scheduler.abort(request.request_id)
            raise
        if request.handoff is not None or request.rendezvous is not None:
            self._schedule_expiry()  # its prefetched blocks are held while it waits
        self._work.set()

    def abort(self, request_id: RequestId) -> None:
        self._drop(request_id)
        self._prefills.fail(request_id, to_info(Cancelled("the prompt was aborted")))
        self._schedule_expiry()
        self._work.set()

    def _drop(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)
        self._runner.drop_request(request_id)

    async def withdraw(self, request_id: RequestId) -> bool:
        if not self._scheduler.withdraw(request_id):
            return False
        self.abort(request_id)
        return True

    async def close(self) -> None:
        self._is_closed = True
        self._own_transfers.close()
        if self._in_flight is not None:
            self._scheduler.discard(self._in_flight)
            self._in_flight = None
        for request in self._scheduler.requests():
            self._drop(request.request_id)
        self._prefills.close(to_info(EngineFailed("the engine was closed", engine="sim")))
        if self._slab is not None:
            self._slab.close()
        self._schedule_expiry()
        self._work.set()

    # --- steps

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._is_closed:
            self._work.clear()
            plan = self._scheduler.plan()
            if self._prefills.has_watchers:
                self._prefills.notify_watchers()  # cached blocks need not wait for the step
            if plan is None:
                self._ends_at = None
                output = self._without_step()
                if output is not None:
                    yield output
                else:
                    await self._work.wait()
                continue
            self._in_flight = plan
            count = self._scheduler.run_length(plan) if self._arguments.merge_steps else 1
            time_s = self._time_of(plan.stats)
            try:
                if count > 1:
                    count, time_s = await self._run_steps(plan.stats, count)
                else:
                    await self._one_step(time_s)
            except BaseException:
                self._discard(plan)
                raise
            if self._in_flight is not plan:
                continue  # closed during the step
            output = self._finish_step(plan, time_s) if count == 1 else self._finish_run(plan, count, time_s)
            if self._observer is not None:
                self._observer.on_step(plan, time_s, self._reported_load)
            yield output

    def _time_of(self, stats: StepStats, count: int = 1) -> float:
        """Time of `count` consecutive steps, each with one more context token per sequence."""
        slow_by = self._arguments.slow_by
        first = self._step_model.step_s(stats)
        if count == 1:
            return first * slow_by
        more = stats.context_tokens + stats.batch * (count - 1)
        last = self._step_model.step_s(msgspec.structs.replace(stats, context_tokens=more))
        return count * (first + last) / 2 * slow_by

    async def _one_step(self, time_s: float) -> None:
        """Wait for a step, measured from the scheduled end of the previous one: timer delays and the engine's
        own work since then are part of the step, so that the rate of steps matches the model on a real
        clock."""
        now = _now()
        late_s = 0.0 if self._ends_at is None else min(max(now - self._ends_at, 0.0), time_s)
        self._ends_at = now + time_s - late_s
        await asyncio.sleep(time_s - late_s)

    async def _run_steps(self, stats: StepStats, count: int) -> tuple[int, float]:
        """Wait for `count` steps, or, if a change occurs, for the end of the current step; returns the number
        and time of the steps."""
        started_at = _now()
        self._ends_at = None
        all_s = self._time_of(stats, count)
        if not await self._work.wait(all_s):
            return count, all_s
        elapsed_s = _now() - started_at
        done = bisect_left(range(1, count), elapsed_s, key=lambda number: self._time_of(stats, number)) + 1
        time_s = self._time_of(stats, done)
        await asyncio.sleep(time_s - elapsed_s)
        return done, time_s

    def _discard(self, plan: StepPlan) -> None:
        if self._in_flight is plan:
            self._in_flight = None
            self._scheduler.discard(plan)

    def _without_step(self) -> StepOutput | None:
        """Output without a step: cache changes, or a changed load."""
        changes, load = self._scheduler.take_changes(), self.load()
        if not changes and load == msgspec.structs.replace(self._reported_load, step=None):
            return None
        self._reported_load = load
        return StepOutput(load=load, kv_changes=changes)

    def _finish_step(self, plan: StepPlan, time_s: float) -> StepOutput:
        self._in_flight = None
        new_tokens = self._scheduler.commit(plan, self._runner.run(plan), self._plain)
        plain_ids, plain_tokens = self._plain.drain()
        if self._prefills.num_in_progress:
            new_tokens = [new for new in new_tokens if not self._is_remote_prefill(new)]
        if self._prefills.has_watchers:
            self._prefills.notify_watchers()
        deltas = tuple((new.sequence.request.request_id, self._runner.delta(new)) for new in new_tokens)
        self._reported_load = load_of(self._scheduler, msgspec.structs.replace(plan.stats, time_s=time_s))
        return StepOutput(
            deltas,
            load=self._reported_load,
            plain_ids=plain_ids,
            plain_tokens=plain_tokens,
            kv_changes=self._scheduler.take_changes(),
        )

    def _finish_run(self, plan: StepPlan, count: int, time_s: float) -> StepOutput:
        self._in_flight = None
        ran = self._scheduler.commit_run(plan, self._runner.run_decodes(plan, count), self._runner.fill)
        self._reported_load = load_of(
            self._scheduler, msgspec.structs.replace(plan.stats, time_s=time_s / count)
        )
        return StepOutput(
            tuple((new.sequence.request.request_id, delta_of_run(new)) for new in ran),
            load=self._reported_load,
            kv_changes=self._scheduler.take_changes(),
        )

    # --- KvEvents, KvVisible, KvMovable

    async def clear_kv(self) -> int:
        num_blocks = self._scheduler.clear()
        self._work.set()
        return num_blocks

    async def match(self, request: Request) -> int:
        return self._exchange.match(request)

    async def kv_contents(self) -> tuple[Stored, ...]:
        return self._exchange.contents()

    def kv_layout(self) -> KvLayout:
        return layout(self._arguments.block_size)

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        return tuple(self._exchange.keys(request))

    async def export_kv(self, keys: Sequence[BlockKey]) -> tuple[KvBlock, ...]:
        blocks = self._exchange.export_kv(keys)
        return blocks if await self._transfers.move(self._size_of(blocks), NETWORK_OUT) else ()

    async def import_kv(self, blocks: Sequence[KvBlock]) -> int:
        if not await self._transfers.move(self._size_of(blocks), NETWORK_IN):
            return 0
        num_cached = self._exchange.import_kv(blocks)
        self._work.set()
        return num_cached

    # --- KvAddressable

    def kv_slabs(self) -> tuple[Slab, ...]:
        if self._arguments.trace_blocks:
            raise Unsupported("trace blocks have no content", feature="kv_slabs")
        if self._slab is None:
            self._slab = self._memory.share(self._arguments.kv_blocks, self._arguments.block_size)
        return (self._slab,)

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        return self._exchange.held(request_id)

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        result: asyncio.Future[HeldKv] = asyncio.get_running_loop().create_future()
        self._prefills.watch(request_id, after, lambda outcome: _resolve(result, outcome))
        self._prefills.notify_watchers()
        return await result

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        return self._exchange.allocate_kv(keys, hashes)

    async def commit_kv(
        self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None = None
    ) -> None:
        if not await self._transfers.move(self._size(num_filled), NETWORK_IN):
            num_filled = 0
        if self._is_closed:
            keep_for = None
        self._exchange.commit(allocation, num_filled, keep_for, self._prefills.expires_at)
        self._schedule_expiry()
        self._work.set()

    # --- KvTierable

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        sealed = self._exchange.pin_sealed(name, self._prefills.hold_s)
        if sealed:
            self._prefills.start_hold(name)
            self._schedule_expiry()
        return sealed

    async def attach_kv(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        attached = self._exchange.attach(allocation, num_last, request_id)
        self._work.set()
        return attached

    def _size(self, num_blocks: int) -> int:
        """Simulated size of this many blocks."""
        return num_blocks * self._arguments.block_size * self._arguments.kv_bytes_per_token

    def _size_of(self, blocks: Sequence[KvBlock]) -> int:
        """Simulated size of these blocks."""
        return self._size(len(blocks))

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        result: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._prefills.start(
            request,
            lambda short: self._add(short, keep_blocks=True),
            lambda outcome: _resolve(result, outcome),
        )
        try:
            return await result
        except asyncio.CancelledError:
            await self.release_prefill(request.request_id)
            raise

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)
        self._schedule_expiry()
        self._work.set()

    def _is_remote_prefill(self, new: NewToken) -> bool:
        """Whether a token belongs to a prompt computed for a remote decode."""
        if not self._prefills.consume_token(new):
            return False
        self._schedule_expiry()
        return True

    def _schedule_expiry(self) -> None:
        """Set the timer for the next expiry of held or prefetched blocks."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        expires_at = self._prefills.next_expiry
        if expires_at is not None:
            self._expiry = asyncio.get_running_loop().call_at(expires_at, self._on_expiry)

    def _on_expiry(self) -> None:
        self._prefills.expire()
        self._schedule_expiry()
        self._work.set()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _resolve(future: asyncio.Future[R], outcome: R | ErrorInfo) -> None:
    if future.done():
        return  # its caller was cancelled
    if isinstance(outcome, ErrorInfo):
        future.set_exception(from_info(outcome))
    else:
        future.set_result(outcome)


def _check_tokens(request: Request) -> None:
    """Reject invalid prior tokens here, since in a step they would fail all requests. Hashing checks the prompt."""
    for resumed in (request.prior_tokens, *request.prior_tokens_by_choice):
        if resumed:
            token_bytes(resumed)
    if request.handoff is not None and request.handoff.first_tokens:
        token_bytes(request.handoff.first_tokens)
