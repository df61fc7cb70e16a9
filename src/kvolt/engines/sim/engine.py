"""The simulated engine: real scheduling, real blocks and streaming, time from a step model, no computing.

Scheduler, pool and the rules of moving blocks are those of the native engine. In the place of the model there are
answers that follow from all tokens before them, or a script (`sim_runner`, `sim_answer`, `sim_script`), and a memory
whose bytes name the tokens that they were computed from (`sim_kv`): wrong KV makes wrong text.
A step takes as long as the latency model says, on whatever loop it runs.

Of the sampling parameters `seed`, `n`, `allowed_token_ids`, `logprobs` and `prompt_logprobs` are honoured, the
last two with figures that are made up. Temperature, top_p, top_k, min_p, penalties and logit_bias are taken
and change nothing: there are no logits. There are no grammars either; those are refused.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import Cancelled, EngineFailed, ErrorInfo, Unsupported, from_info, to_info
from kvolt.core.hashing import token_bytes
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_block import KvBlock, KvLayout
from kvolt.core.kv_events import Stored
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import EngineSpec, KvHeld, KvRoom, KvTaken, SealedKv
from kvolt.engines.kv_exchange import KvExchange
from kvolt.engines.prefills import Prefills
from kvolt.engines.sim.arguments import SimArguments, links_of, model_of, step_model_of
from kvolt.engines.sim.kv import BLOCK_BYTES, SimMemory, key_context, layout
from kvolt.engines.sim.runner import SimRunner
from kvolt.engines.sim.script import Speaker
from kvolt.engines.sim.trace_blocks import PaperNaming
from kvolt.engines.sim.transfers import NETWORK_IN, NETWORK_OUT, SimTransfers
from kvolt.engines.step_watch import StepWatch
from kvolt.engines.wakeup import Wakeup
from kvolt.kv import BlockPool
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_output import delta_of_run, load_of
from kvolt.scheduler.step_plan import Advanced, Limits, PlainBatch, StepPlan
from kvolt.transfer.memory.slabs import Slab

__all__ = ["SimArguments", "SimEngine"]


R = TypeVar("R")

_ON_PAPER = ("KvEvents", "KvPlaced", "Prefill")
"""What an engine can do whose blocks have neither tokens nor bytes: who moves them must not look for any."""


class SimEngine:
    """See the module. One task reads `steps`; everything else is called from the same loop."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: SimArguments,
        watch: StepWatch | None = None,
        transfers: SimTransfers | None = None,
    ) -> None:
        """Engines that are given the same transfers share its links, as those of one machine do."""
        self._spec = spec
        self._arguments = arguments
        self._watch = watch
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
            (lambda request: PaperNaming(request, arguments.block_size)) if arguments.paper else None,
        )
        memory = self._memory = SimMemory()
        self._slab: Slab | None = None
        speaker = Speaker(
            model,
            arguments.say,
            arguments.say_from_prompt,
            arguments.words,
            reads_prompts=not arguments.paper,
        )
        runner_memory = None if arguments.paper else memory
        self._runner = SimRunner(speaker, runner_memory, self._card.name, arguments.block_size)
        self._exchange = KvExchange(self._scheduler, memory, BLOCK_BYTES)
        self._own_transfers = SimTransfers(links_of(arguments), _now)
        self._transfers = transfers or self._own_transfers
        self._prefills = Prefills(self._scheduler, self._forget, _now, arguments.hold_s)
        self._plain = PlainBatch()
        self._told_load = load_of(self._scheduler)
        self._in_flight: StepPlan | None = None
        self._ends_at: float | None = None
        """When the latest step was to end; None where the next one does not follow it at once."""
        self._expiry: asyncio.TimerHandle | None = None
        self._work = Wakeup()
        """Something has changed that a step, or the lack of one, has to tell."""
        self._closed = False

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
            kv_layout=None if arguments.paper else self.kv_layout().name,
            features=_ON_PAPER if arguments.paper else (),
            kv_events=arguments.kv_events,
            latency=model if isinstance(model, LatencyModel) else None,
            occupancy_latency=model if isinstance(model, OccupancyModel) else None,
        )

    def load(self) -> WorkerLoad:
        """What it is busy with now."""
        return load_of(self._scheduler)

    def submit(self, request: Request) -> None:
        self._add(request, keep_blocks=False)

    def _add(self, request: Request, keep_blocks: bool) -> None:
        if self._closed:
            raise EngineFailed("the engine is closed", engine="sim")
        if request.grammar is not None:
            raise Unsupported("the sim engine has no grammars", feature="grammar")
        if request.extra.get("logits_processors"):
            raise Unsupported("the sim engine has no logits processors", feature="logits_processors")
        _check_tokens(request)
        self._scheduler.add(request, keep_blocks=keep_blocks)
        try:
            self._runner.add(request)
        except BaseException:
            self._scheduler.abort(request.request_id)
            raise
        if request.handoff is not None or request.rendezvous is not None:
            self._watch_expiry()  # what came for it stays for as long as it waits
        self._work.ring()

    def abort(self, request_id: RequestId) -> None:
        self._forget(request_id)
        self._prefills.fail(request_id, to_info(Cancelled("the prompt was aborted")))
        self._watch_expiry()
        self._work.ring()

    def _forget(self, request_id: RequestId) -> None:
        self._scheduler.abort(request_id)
        self._runner.forget(request_id)

    async def withdraw(self, request_id: RequestId) -> bool:
        if not self._scheduler.withdraw(request_id):
            return False
        self.abort(request_id)
        return True

    async def close(self) -> None:
        self._closed = True
        self._own_transfers.close()
        if self._in_flight is not None:
            self._scheduler.discard(self._in_flight)
            self._in_flight = None
        for request in self._scheduler.requests():
            self._forget(request.request_id)
        self._prefills.close(to_info(EngineFailed("the engine was closed", engine="sim")))
        if self._slab is not None:
            self._slab.close()
        self._watch_expiry()
        self._work.ring()

    # --- steps

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._closed:
            self._work.silence()
            plan = self._scheduler.plan()
            if self._prefills.is_watched:
                self._prefills.tell()  # what was found in the cache need not wait for the step
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
                continue  # closed meanwhile
            output = self._finish_step(plan, time_s) if count == 1 else self._finish_run(plan, count, time_s)
            if self._watch is not None:
                self._watch.on_step(plan, time_s, self._told_load)
            yield output

    def _time_of(self, stats: StepStats, count: int = 1) -> float:
        """Of so many steps, each of which reads a token more of each sequence than the one before."""
        slow_by = self._arguments.slow_by
        first = self._step_model.step_s(stats)
        if count == 1:
            return first * slow_by
        more = stats.context_tokens + stats.batch * (count - 1)
        last = self._step_model.step_s(msgspec.structs.replace(stats, context_tokens=more))
        return count * (first + last) / 2 * slow_by

    async def _one_step(self, time_s: float) -> None:
        """The time of a step, from when the one before was to end: what timers and our own work took since then is a
        part of it, or a real clock would see fewer steps than the model tells."""
        now = _now()
        late_s = 0.0 if self._ends_at is None else min(max(now - self._ends_at, 0.0), time_s)
        self._ends_at = now + time_s - late_s
        await asyncio.sleep(time_s - late_s)

    async def _run_steps(self, stats: StepStats, count: int) -> tuple[int, float]:
        """The time of `count` steps, or of fewer if something comes: then the step ends that is under way."""
        began_at = _now()
        self._ends_at = None
        all_s = self._time_of(stats, count)
        if not await self._work.wait(all_s):
            return count, all_s
        elapsed_s = _now() - began_at
        done = bisect_left(range(1, count), elapsed_s, key=lambda number: self._time_of(stats, number)) + 1
        time_s = self._time_of(stats, done)
        await asyncio.sleep(time_s - elapsed_s)
        return done, time_s

    def _discard(self, plan: StepPlan) -> None:
        if self._in_flight is plan:
            self._in_flight = None
            self._scheduler.discard(plan)

    def _without_step(self) -> StepOutput | None:
        """What happened although nothing was computed."""
        changes, load = self._scheduler.take_changes(), self.load()
        if not changes and load == msgspec.structs.replace(self._told_load, step=None):
            return None
        self._told_load = load
        return StepOutput(load=load, kv_changes=changes)

    def _finish_step(self, plan: StepPlan, time_s: float) -> StepOutput:
        self._in_flight = None
        advanced = self._scheduler.commit(plan, self._runner.run(plan), self._plain)
        plain_ids, plain_tokens = self._plain.take()
        if self._prefills.num_open:
            advanced = [one for one in advanced if not self._is_for_others(one)]
        if self._prefills.is_watched:
            self._prefills.tell()
        deltas = tuple((one.sequence.request.request_id, self._runner.delta(one)) for one in advanced)
        self._told_load = load_of(self._scheduler, msgspec.structs.replace(plan.stats, time_s=time_s))
        return StepOutput(
            deltas,
            load=self._told_load,
            plain_ids=plain_ids,
            plain_tokens=plain_tokens,
            kv_changes=self._scheduler.take_changes(),
        )

    def _finish_run(self, plan: StepPlan, count: int, time_s: float) -> StepOutput:
        self._in_flight = None
        ran = self._scheduler.commit_run(plan, self._runner.speak(plan, count), self._runner.fill)
        self._told_load = load_of(self._scheduler, msgspec.structs.replace(plan.stats, time_s=time_s / count))
        return StepOutput(
            tuple((one.sequence.request.request_id, delta_of_run(one)) for one in ran),
            load=self._told_load,
            kv_changes=self._scheduler.take_changes(),
        )

    # --- KvEvents, KvVisible, KvMovable

    async def clear_kv(self) -> int:
        num_blocks = self._scheduler.clear()
        self._work.ring()
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
        num_here = self._exchange.import_kv(blocks)
        self._work.ring()
        return num_here

    # --- KvPlaced

    def kv_slabs(self) -> tuple[Slab, ...]:
        if self._arguments.paper:
            raise Unsupported("on paper blocks hold nothing", feature="kv_slabs")
        if self._slab is None:
            self._slab = self._memory.share(self._arguments.kv_blocks, self._arguments.block_size)
        return (self._slab,)

    async def hold_kv(self, request_id: RequestId) -> KvHeld:
        return self._exchange.hold(request_id)

    async def computed_kv(self, request_id: RequestId, after: int) -> KvHeld:
        told: asyncio.Future[KvHeld] = asyncio.get_running_loop().create_future()
        self._prefills.watch(request_id, after, lambda found: _settle(told, found))
        self._prefills.tell()
        return await told

    async def make_room(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvRoom:
        return self._exchange.make_room(keys, hashes)

    async def settle_kv(self, room: KvRoom, num_filled: int, keep_for: RequestId | None = None) -> None:
        if not await self._transfers.move(self._size(num_filled), NETWORK_IN):
            num_filled = 0
        if self._closed:
            keep_for = None
        self._exchange.settle(room, num_filled, keep_for, self._prefills.expires_at)
        self._watch_expiry()
        self._work.ring()

    # --- KvTierable

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        found = self._exchange.pin_sealed(name, self._prefills.hold_s)
        if found:
            self._prefills.hold(name)
            self._watch_expiry()
        return found

    async def take_kv(self, room: KvRoom, num_last: int, request_id: RequestId) -> KvTaken:
        taken = self._exchange.take(room, num_last, request_id)
        self._work.ring()
        return taken

    def _size(self, num_blocks: int) -> int:
        """Of the blocks that so many of ours stand for."""
        return num_blocks * self._arguments.block_size * self._arguments.kv_bytes_per_token

    def _size_of(self, blocks: Sequence[KvBlock]) -> int:
        """Of the blocks that these stand for."""
        return self._size(len(blocks))

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        done: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._prefills.start(
            request,
            lambda short: self._add(short, keep_blocks=True),
            lambda found: _settle(done, found),
        )
        try:
            return await done
        except asyncio.CancelledError:
            await self.release_prefill(request.request_id)
            raise

    async def release_prefill(self, request_id: RequestId) -> None:
        self._prefills.release(request_id)
        self._watch_expiry()
        self._work.ring()

    def _is_for_others(self, one: Advanced) -> bool:
        """Whether a token belongs to a prompt that is computed for others."""
        if not self._prefills.take(one):
            return False
        self._watch_expiry()
        return True

    def _watch_expiry(self) -> None:
        """Be woken when the next of the kept prompts expires, here or that came from elsewhere."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        expires_at = self._prefills.next_expiry
        if expires_at is not None:
            self._expiry = asyncio.get_running_loop().call_at(expires_at, self._on_expiry)

    def _on_expiry(self) -> None:
        self._prefills.expire()
        self._watch_expiry()
        self._work.ring()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _settle(answer: asyncio.Future[R], found: R | ErrorInfo) -> None:
    if answer.done():
        return  # its caller has gone
    if isinstance(found, ErrorInfo):
        answer.set_exception(from_info(found))
    else:
        answer.set_result(found)


def _check_tokens(request: Request) -> None:
    """What are no tokens is refused here: in a step it would hurt all others. (The prompt is looked at anyway.)"""
    for resumed in (request.resume, *request.resume_choices):
        if resumed:
            token_bytes(resumed)
    if request.handoff is not None and request.handoff.first_tokens:
        token_bytes(request.handoff.first_tokens)
