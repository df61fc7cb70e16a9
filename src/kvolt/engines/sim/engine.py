"""SimEngine: real scheduling, blocks and streaming, with step times from a model instead of computation.

Uses the scheduler, the pool and the block exchange of the native engine. Instead of a model it has answers derived
from all tokens before them, or a script (`sim.runner`, `sim.script`), and memory whose content
identifies the tokens it was computed from (`sim.kv`), so that wrong KV produces wrong text. Steps take the time of
the latency model on the running event loop.

Of the sampling parameters `seed`, `n`, `allowed_token_ids`, `logprobs` and `prompt_logprobs` are honoured, the last
two with synthetic values. Temperature, top_p, top_k, min_p, penalties and logit_bias are accepted and ignored, since
there are no logits. Grammars are not supported.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator

import msgspec

from kvolt.core.card import Capacity, EngineInfo, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import Cancelled, EngineFailed, InvalidRequest, Unavailable, Unsupported, to_info
from kvolt.core.hashing import token_bytes
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS, EngineSpec
from kvolt.engines.sim.arguments import SimArguments, model_of, step_model_of
from kvolt.engines.sim.kv_capabilities import KvCapabilities, now
from kvolt.engines.sim.runner import SimRunner, StepObserver
from kvolt.engines.sim.script import AnswerScripts
from kvolt.scheduler.step_output import delta_of_run, load_of
from kvolt.scheduler.step_plan import NewToken, PlainBatch, StepPlan

__all__ = ["SimArguments", "SimEngine"]

_TRACE_FEATURES = ("KvEvents", "KvAddressable", "Prefill")
"""Features with trace blocks, which have neither tokens nor content."""


class SimEngine(KvCapabilities):
    """See the module. One task reads `steps`; everything else is called from the same loop."""

    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "allowed_token_ids", "prompt_logprobs"}
    """All are accepted; the module says which have an effect."""

    def __init__(
        self,
        spec: EngineSpec,
        arguments: SimArguments,
        observer: StepObserver | None = None,
    ) -> None:
        """Engines with the same `transfers` share its links, like engines on one machine."""
        model = model_of(spec.model, arguments)
        super().__init__(model.card, arguments)
        self._spec = spec
        self._observer = observer
        self._step_model = step_model_of(arguments)
        scripts = AnswerScripts(
            model,
            arguments.answer_text,
            arguments.answer_from_prompt,
            arguments.words,
            reads_prompts=not arguments.trace_blocks,
        )
        memory = None if arguments.trace_blocks else self._memory
        self._runner = SimRunner(scripts, memory, self.card.name, arguments.block_size)
        self._plain = PlainBatch()
        self._reported_load = load_of(self._scheduler)
        self._is_asleep = False
        self._in_flight: StepPlan | None = None
        self._ends_at: float | None = None
        """Scheduled end of the latest step; None if the next one does not follow immediately."""

    async def start(self) -> EngineInfo:
        arguments, model = self._arguments, self._step_model
        return EngineInfo(
            engine="sim",
            role=self._spec.role,
            model=self.card.name,
            card=card_hash(self.card),
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
        if self._is_asleep:
            raise Unavailable("the engine is asleep", reason="asleep")
        if request.grammar is not None:
            raise Unsupported("the sim engine has no grammars; serve a real model", feature="grammar")
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

    # --- Sleep

    async def sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise InvalidRequest(f"the sim engine sleeps at level 1 or 2, not {level}", param="level")
        if self._scheduler.requests() or self._prefills.num_open:
            raise Unavailable("the engine cannot sleep while requests run", reason="busy")
        self._is_asleep = True
        await self.clear_kv()

    async def wake(self) -> None:
        self._is_asleep = False

    async def close(self) -> None:
        self._is_closed = True
        self._transfers.close()
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
                if self._in_flight is plan:
                    self._in_flight = None
                    self._scheduler.discard(plan)
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
        started_at = now()
        late_s = 0.0 if self._ends_at is None else min(max(started_at - self._ends_at, 0.0), time_s)
        self._ends_at = started_at + time_s - late_s
        await asyncio.sleep(time_s - late_s)

    async def _run_steps(self, stats: StepStats, count: int) -> tuple[int, float]:
        """Wait for `count` steps, or, if a change occurs, for the end of the current step; returns the number
        and time of the steps."""
        started_at = now()
        self._ends_at = None
        all_s = self._time_of(stats, count)
        if not await self._work.wait(all_s):
            return count, all_s
        elapsed_s = now() - started_at
        done = bisect_left(range(1, count), elapsed_s, key=lambda number: self._time_of(stats, number)) + 1
        time_s = self._time_of(stats, done)
        await asyncio.sleep(time_s - elapsed_s)
        return done, time_s

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

    def _is_remote_prefill(self, new: NewToken) -> bool:
        """Whether a token belongs to a prompt computed for a remote decode."""
        if not self._prefills.consume_token(new):
            return False
        self._schedule_expiry()
        return True


def _check_tokens(request: Request) -> None:
    """Reject invalid prior tokens here, since in a step they would fail all requests. Hashing checks the prompt."""
    for resumed in (request.prior_tokens, *request.prior_tokens_by_choice):
        if resumed:
            token_bytes(resumed)
    if request.handoff is not None and request.handoff.first_tokens:
        token_bytes(request.handoff.first_tokens)
