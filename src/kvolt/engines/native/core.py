"""EngineCore: scheduler, model and sampler, one step at a time.

Synchronous, for one thread; commands are handled between steps. Owns the sampling state of sequences (seed,
grammar, processors) and builds StepOutputs. Everything beyond generation (moving blocks, adapters,
embeddings) is in `capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import torch

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import Delta, StepOutput, TokenLogprobs
from kvolt.core.errors import EngineFailed, ErrorInfo, KvoltError, Overloaded, Unsupported, to_info
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.native.capabilities import Capabilities
from kvolt.engines.native.grammar.threads import CompilingThreads
from kvolt.engines.native.runner import Computed, ModelRunner
from kvolt.engines.native.sampling.draw import sampling_seed
from kvolt.engines.native.sampling.logprobs import prompt_logprobs
from kvolt.engines.native.sampling.processors import LogitsProcessor, make_processors
from kvolt.engines.native.sampling.sampler import Row, Sampled, check_sampling, sample
from kvolt.runtime.clock import Clock
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.step_output import delta_of, load_of
from kvolt.scheduler.step_plan import NewToken, PlainBatch, StepPlan, Work

if TYPE_CHECKING:
    from kvolt.engines.native.grammar.compiler import CompiledGrammar, GrammarCompiler, Matcher

_COMPILE_WAIT_S = 0.01
"""How long an idle step waits for grammars to be compiled."""


@dataclass(slots=True)
class SamplingState:
    """Sampling state of one sequence."""

    row: Row
    matcher: Matcher | None
    output: list[int]
    """Tokens generated so far, shared with the row."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failure: str | None = None
    """Reason why no token can be sampled; the request fails at its first token."""


class EngineCore:
    """See the module."""

    def __init__(
        self,
        card: ModelCard,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: ModelRunner,
        has_blocks: bool,
        grammars: Callable[[], GrammarCompiler],
        keys: Callable[[Request], BlockKeyContext],
        clock: Clock,
    ) -> None:
        self.card = card
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self.keys_of = keys
        """Returns the constant part of a request's block keys."""
        self.capabilities = Capabilities(self, has_blocks, clock.monotonic)
        self._now = clock.monotonic
        self._ended_at: float | None = None
        """End of the previous step if it left work, else None."""
        self.closing = ExitStack()
        """Resources that `close` releases."""
        self.on_step: Callable[[StepStats], None] = lambda stats: None
        self._grammars = CompilingThreads(grammars)
        self._compiling: dict[RequestId, tuple[Request, bool, Future[CompiledGrammar]]] = {}
        self._compiled: dict[RequestId, CompiledGrammar] = {}
        self._sampling: dict[Sequence, SamplingState] = {}
        self._failed: list[tuple[RequestId, ErrorInfo]] = []
        self._plain = PlainBatch()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling) or bool(self._failed)

    # --- requests

    def submit(self, request: Request, keep_blocks: bool = False) -> None:
        """Enqueue a request. KvoltError if it cannot run here; an invalid grammar fails it later.

        `keep_blocks` as in `Scheduler.add_request`.
        """
        make_processors(request.extra)  # raises for an unknown processor
        check_sampling(request.sampling, self.runner.model.config.vocab_size)
        if request.media:
            raise Unsupported("the native engine does not support media", feature="media")
        if request.lora and request.lora not in self.runner.model.adapters.names:
            self.runner.model.adapters.digest(request.lora)  # raises NotFound with the loaded names
        if request.grammar is None:
            self.scheduler.add_request(request, keep_blocks=keep_blocks)
            return
        compiled = self._grammars.find_compiled(request.grammar)
        if compiled is not None:
            self._admit(request, keep_blocks, compiled)
            return
        limit = self.scheduler.limits.max_waiting
        if len(self._compiling) >= limit:
            raise Overloaded("too many grammars wait to be compiled", queue="grammars", limit=limit)
        future = self._grammars.start(request.grammar)
        self._compiling[request.request_id] = (request, keep_blocks, future)

    def abort(self, request_id: RequestId) -> None:
        self._stop_compiling(request_id)
        self.scheduler.abort(request_id)
        self._drop_state(request_id)

    def withdraw(self, request_id: RequestId) -> bool:
        if self._stop_compiling(request_id):
            self.scheduler.prefetched.release_expected(request_id)
            return True
        if not self.scheduler.withdraw(request_id):
            return False
        self._drop_state(request_id)
        return True

    def drop_lora(self, name: str) -> None:
        """Fail the requests of an adapter that is being unloaded."""
        compiling = [request for request, _, _ in self._compiling.values()]
        for request in (*self.scheduler.requests(), *compiling):
            if request.lora == name:
                self._stop_compiling(request.request_id)
                self._fail(
                    request.request_id, EngineFailed(f"adapter {name!r} was unloaded", engine="native")
                )

    def close(self) -> None:
        self._grammars.close()
        self.closing.close()

    # --- steps

    def step(self) -> StepOutput | None:
        """Run one step; returns its output, or None if there is nothing to report.

        Its time starts at the end of the previous step if that left work: the time between (output, commands, planning)
        delays tokens like the model does, and predictions of a run add up step times.
        """
        started = self._now() if self._ended_at is None else self._ended_at
        self._ended_at = None
        self.capabilities.prefills.expire()
        self._admit_compiled()
        plan = self.scheduler.plan()
        self.capabilities.notify_computed()  # cached blocks need not wait for the step
        if plan is None:
            if self._compiling:
                self._wait_for_grammar()
            return self._without_step()
        try:
            computed = self.runner.run(plan)
            sampling_works = [work for work in chain(plan.decodes, plan.prefills) if work.samples]
            states = [self._sampling_state(work.sequence) for work in sampling_works]
            rows = [
                self._row(work.sequence, state) for work, state in zip(sampling_works, states, strict=True)
            ]
            sampled = sample(computed.logits, rows)
            self._compute_prompt_logprobs(plan, computed)
            if not sampling_works:
                # Nothing was read back, so the device may still be computing: wait, or the next step would be
                # planned before newer requests arrive, and its time would include this one.
                self.runner.wait()
        except BaseException:
            self.scheduler.discard(plan)
            raise
        for work, state, one in zip(sampling_works, states, sampled, strict=True):
            self._accept(work, state, one)
        new_tokens = self.scheduler.commit(plan, [one.token or 0 for one in sampled], self._plain)
        by_sequence = {id(work.sequence): one for work, one in zip(sampling_works, sampled, strict=True)}
        ended = self._now()
        stats = msgspec.structs.replace(plan.stats, time_s=ended - started)
        if self.has_work:
            self._ended_at = ended
        if (pace := self.scheduler.planner.pace) is not None:
            pace.observe(stats)
        self.on_step(stats)
        self.capabilities.notify_computed()
        return self._build_output(new_tokens, by_sequence, stats)

    def load(self, stats: StepStats | None = None) -> WorkerLoad:
        return load_of(self.scheduler, stats, num_pending=len(self._compiling))

    # --- sampling

    def _sampling_state(self, sequence: Sequence) -> SamplingState:
        state = self._sampling.get(sequence)
        if state is None:
            request = sequence.request
            output = sequence.tokens[sequence.num_prompt :]
            grammar = self._compiled.get(request.request_id)
            matcher = grammar.start(output) if grammar is not None else None
            processors: tuple[LogitsProcessor, ...] = ()
            failure = None
            try:
                processors = make_processors(request.extra)
            except KvoltError as error:  # although it was created at submit
                failure = error.message
            row = Row(
                sampling=request.sampling,
                seed=sampling_seed(request.sampling.seed, request.request_id),
                choice=sequence.index,
                prompt=request.token_ids,
                output=output,
                processors=processors,
            )
            if matcher is not None and self._grammars.compiler is not None:
                row.mask = torch.empty(self._grammars.compiler.mask_words, dtype=torch.int32)
            state = self._sampling[sequence] = SamplingState(row, matcher, output, failure=failure)
        return state

    def _row(self, sequence: Sequence, state: SamplingState) -> Row:
        row = state.row
        row.position = sequence.num_output
        if row.banned or sequence.request.stop.min_tokens:
            row.banned = tuple(sequence.banned_ids)
        if state.matcher is not None and row.mask is not None:
            state.matcher.fill(row.mask)
            if state.matcher.is_done:
                row.banned = ()  # only an end of sequence is possible, even before min_tokens
        return row

    def _accept(self, work: Work, state: SamplingState, sampled: Sampled) -> None:
        request_id = work.sequence.request.request_id
        if work.sequence.phase is not Phase.RUNNING:
            return  # another choice of its request failed in this step
        if state.failure is not None or sampled.token is None:
            reason = state.failure or sampled.failure or "no token is allowed"
            self._fail(request_id, EngineFailed(reason, engine="native"))
            return
        state.output.append(sampled.token)
        if state.matcher is not None and not state.matcher.accept(sampled.token):
            self._fail(
                request_id, EngineFailed("the grammar rejected a token that it allowed", engine="native")
            )

    def _compute_prompt_logprobs(self, plan: StepPlan, computed: Computed) -> None:
        """Compute requested prompt log probabilities, chunk by chunk."""
        for number, work in enumerate(plan.prefills, len(plan.decodes)):
            sequence = work.sequence
            if not sequence.needs_prompt_logits:
                continue
            logprobs = self._sampling_state(sequence).prompt_logprobs
            del logprobs[work.start + 1 :]  # left by a failed step or from before a preemption
            if work.start == 0:
                logprobs[:] = [None]
            count = min(work.num_tokens, sequence.num_prompt - 1 - work.start)
            if count <= 0:
                continue
            following = iter(sequence.tokens[work.start + 1 : work.start + 1 + count])
            for logits in self.runner.each_prompt_logits(computed, number, work, count):
                tokens = [next(following) for _ in range(logits.shape[0])]
                logprobs += prompt_logprobs(logits, tokens, sequence.request.sampling.prompt_logprobs or 0)

    # --- output

    def _build_output(
        self, new_tokens: list[NewToken], sampled: dict[int, Sampled], stats: StepStats
    ) -> StepOutput:
        plain_ids, plain_tokens = self._plain.drain()
        deltas: list[tuple[RequestId, Delta]] = []
        for new in new_tokens:
            sequence = new.sequence
            if self.capabilities.prefills.consume_token(new):
                self._sampling.pop(sequence, None)
                continue
            deltas.append((sequence.request.request_id, self._delta(new, sampled[id(sequence)])))
            if new.end is not None:
                self._sampling.pop(sequence, None)
        if self._compiled and any(new.end is not None for new in new_tokens):
            self._drop_grammars()
        return StepOutput(
            tuple(deltas),
            failed=self._take_failed(),
            load=self.load(stats),
            plain_ids=plain_ids,
            plain_tokens=plain_tokens,
            kv_changes=self.scheduler.take_changes(),
        )

    def _delta(self, new: NewToken, sampled: Sampled) -> Delta:
        sequence = new.sequence
        prompt_logprobs = None
        if new.is_first and sequence.index == 0:
            state = self._sampling.get(sequence)
            if state is not None and state.prompt_logprobs:
                prompt_logprobs = tuple(state.prompt_logprobs)
                state.prompt_logprobs = []
        return delta_of(new, sampled.logprobs, prompt_logprobs)

    def _without_step(self) -> StepOutput | None:
        failed, changes = self._take_failed(), self.scheduler.take_changes()
        if not failed and not changes:
            return None
        return StepOutput(failed=failed, load=self.load(), kv_changes=changes)

    # --- grammars and failures

    def _admit_compiled(self) -> None:
        for request_id, (request, keep_blocks, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            try:
                self._admit(request, keep_blocks, future.result())
            except KvoltError as error:
                self._fail(request_id, error)
            except Exception as error:  # from the compiler's thread
                reason = f"its grammar failed to compile: {type(error).__name__}: {str(error)[:200]}"
                self._fail(request_id, EngineFailed(reason, engine="native"))

    def _admit(self, request: Request, keep_blocks: bool, compiled: CompiledGrammar) -> None:
        for tokens in _prior_output(request):
            compiled.start(tokens)  # rejects prior tokens that violate it here, not in a step
        self.scheduler.add_request(request, keep_blocks=keep_blocks)
        self._compiled[request.request_id] = compiled

    def _stop_compiling(self, request_id: RequestId) -> bool:
        """Cancel the compilation of a request's grammar if it has not started; returns whether the request
        waited for it."""
        entry = self._compiling.pop(request_id, None)
        if entry is None:
            return False
        _, _, future = entry
        future.cancel()
        return True

    def _wait_for_grammar(self) -> None:
        """Wait briefly for a grammar, if there is nothing else to do."""
        wait([future for _, _, future in self._compiling.values()], _COMPILE_WAIT_S, FIRST_COMPLETED)

    def _drop_grammars(self) -> None:
        """Drop the grammars of requests that have ended. Waiting requests and choices still need theirs."""
        live = {request.request_id for request in self.scheduler.requests()}
        for request_id in self._compiled.keys() - live:
            del self._compiled[request_id]

    def _fail(self, request_id: RequestId, error: KvoltError) -> None:
        self.scheduler.abort(request_id)
        self._drop_state(request_id)
        info = to_info(error)
        if not self.capabilities.prefills.fail(request_id, info):
            self._failed.append((request_id, info))

    def _take_failed(self) -> tuple[tuple[RequestId, ErrorInfo], ...]:
        failed, self._failed = tuple(self._failed), []
        return failed

    def _drop_state(self, request_id: RequestId) -> None:
        self._compiled.pop(request_id, None)
        dropped = [sequence for sequence in self._sampling if sequence.request.request_id == request_id]
        for sequence in dropped:
            del self._sampling[sequence]


def _prior_output(request: Request) -> list[tuple[int, ...]]:
    """Prior output of a request: one entry per choice if they differ."""
    if request.prior_tokens_by_choice:
        return [request.prior_tokens_of(index) for index in request.open_choices]
    if request.prior_tokens or request.handoff is None or request.handoff.first_tokens is None:
        return [request.prior_tokens]
    return [(token,) for token in request.handoff.first_tokens]
