"""EngineCore: scheduler, model and sampler, one step at a time.

Synchronous, for one thread: whoever runs it takes commands between steps. Owns what a sequence needs for
sampling (seed, grammar, processors) and the wording of what a step gave as a StepOutput. What goes beyond
generating (moving blocks, adapters, embeddings) is in `capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import Delta, StepOutput, TokenLogprobs
from kvolt.core.errors import EngineFailed, ErrorInfo, KvoltError, Overloaded, Unsupported, to_info
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.kv_exchange import BlockMemory
from kvolt.engines.native.capabilities import Capabilities
from kvolt.engines.native.grammar.threads import CompilingThreads
from kvolt.engines.native.runner import Computed, ModelRunner
from kvolt.engines.native.sampling.processors import LogitsProcessor, make_processors
from kvolt.engines.native.sampling.randomness import sampling_seed
from kvolt.engines.native.sampling.sampler import Row, Sampled, check_sampling, prompt_logprobs, sample
from kvolt.runtime.clock import Clock
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.step_output import delta_of, load_of
from kvolt.scheduler.step_plan import Advanced, PlainBatch, StepPlan, Work

if TYPE_CHECKING:
    from kvolt.engines.native.grammar.compiler import CompiledGrammar, GrammarCompiler, Matcher

_COMPILE_WAIT_S = 0.01
"""How long a step waits for grammars when there is nothing else to do."""


@dataclass(slots=True)
class Voice:
    """How one sequence chooses its tokens."""

    row: Row
    matcher: Matcher | None
    output: list[int]
    """Its tokens so far, which the row sees."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failure: str | None = None
    """Why it cannot choose any: its request ends with the first token."""


class EngineCore:
    """See the module."""

    def __init__(
        self,
        card: ModelCard,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: ModelRunner,
        blocks: BlockMemory | None,
        grammars: Callable[[], GrammarCompiler],
        keys: Callable[[Request], BlockKeyContext],
        clock: Clock,
    ) -> None:
        self.card = card
        self.info = info
        self.scheduler = scheduler
        self.runner = runner
        self.keys_of = keys
        """What the keys of a request's blocks have in common."""
        self.capabilities = Capabilities(self, blocks, clock.monotonic)
        self._now = clock.monotonic
        self._ended_at: float | None = None
        """When the step before ended, if work was left then."""
        self.closing = ExitStack()
        """What goes when this goes."""
        self.on_step: Callable[[StepStats], None] = lambda stats: None
        self._grammars = CompilingThreads(grammars)
        self._compiling: dict[RequestId, tuple[Request, bool, Future[CompiledGrammar]]] = {}
        self._compiled: dict[RequestId, CompiledGrammar] = {}
        self._voices: dict[Sequence, Voice] = {}
        self._failed: list[tuple[RequestId, ErrorInfo]] = []
        self._plain = PlainBatch()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling) or bool(self._failed)

    # --- requests

    def submit(self, request: Request, keep_blocks: bool = False) -> None:
        """Take a request; KvoltError when it cannot run here. A grammar that is wrong fails it later.

        `keep_blocks` as in `Scheduler.add`.
        """
        make_processors(request.extra)  # an unknown one is refused now
        check_sampling(request.sampling, self.runner.model.config.vocab_size)
        if request.media:
            raise Unsupported("the native engine reads no media", feature="media")
        if request.lora and request.lora not in self.runner.model.adapters.names:
            self.runner.model.adapters.digest(request.lora)  # says which there are
        if request.grammar is None:
            self.scheduler.add(request, keep_blocks=keep_blocks)
            return
        compiled = self._grammars.kept(request.grammar)
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
        self._forget(request_id)

    def withdraw(self, request_id: RequestId) -> bool:
        if self._stop_compiling(request_id):
            self.scheduler.cancel_arrivals(request_id)
            return True
        if not self.scheduler.withdraw(request_id):
            return False
        self._forget(request_id)
        return True

    def drop_lora(self, name: str) -> None:
        """An adapter is about to go: what runs with it ends."""
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
        """One pass through the model; None when there was nothing to say.

        Its time begins where the step before ended, if work was left then: what lies between (telling what came of
        it, commands, planning) holds up the tokens as the model does, and whoever predicts a run adds up steps.
        """
        started = self._now() if self._ended_at is None else self._ended_at
        self._ended_at = None
        self.capabilities.expire()
        self._admit_compiled()
        plan = self.scheduler.plan()
        self.capabilities.tell_computed()  # what was found in the cache need not wait for the step
        if plan is None:
            if self._compiling:
                self._wait_for_grammar()
            return self._without_step()
        try:
            computed = self.runner.run(plan)
            samplers = [work for work in chain(plan.decodes, plan.prefills) if work.samples]
            voices = [self._voice(work.sequence) for work in samplers]
            rows = [self._row(work.sequence, voice) for work, voice in zip(samplers, voices, strict=True)]
            sampled = sample(computed.logits, rows)
            self._read_prompts(plan, computed)
            if not samplers:
                # Nothing was read of it, so a device may only have begun: the next one would be planned without what
                # comes meanwhile, and told as the longer.
                self.runner.wait()
        except BaseException:
            self.scheduler.discard(plan)
            raise
        for work, voice, one in zip(samplers, voices, sampled, strict=True):
            self._accept(work, voice, one)
        advanced = self.scheduler.commit(plan, [one.token or 0 for one in sampled], self._plain)
        by_sequence = {id(work.sequence): one for work, one in zip(samplers, sampled, strict=True)}
        ended = self._now()
        stats = StepStats(
            plan.stats.batch,
            plan.stats.prefill_tokens,
            plan.stats.prefill_context,
            plan.stats.context_tokens,
            ended - started,
            plan.stats.shared_tokens,
        )
        if self.has_work:
            self._ended_at = ended
        if (pace := self.scheduler.pace) is not None:
            pace.observe(stats)
        self.on_step(stats)
        self.capabilities.tell_computed()
        return self._told(advanced, by_sequence, stats)

    def load(self, stats: StepStats | None = None) -> WorkerLoad:
        return load_of(self.scheduler, stats, num_pending=len(self._compiling))

    # --- sampling

    def _voice(self, sequence: Sequence) -> Voice:
        voice = self._voices.get(sequence)
        if voice is None:
            request = sequence.request
            output = sequence.tokens[sequence.num_prompt :]
            grammar = self._compiled.get(request.request_id)
            matcher = grammar.start(output) if grammar is not None else None
            processors: tuple[LogitsProcessor, ...] = ()
            failure = None
            try:
                processors = make_processors(request.extra)
            except KvoltError as error:  # though it could be made at submit
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
            voice = self._voices[sequence] = Voice(row, matcher, output, failure=failure)
        return voice

    def _row(self, sequence: Sequence, voice: Voice) -> Row:
        row = voice.row
        row.position = sequence.num_output
        if row.banned or sequence.request.stop.min_tokens:
            row.banned = tuple(sequence.banned)
        if voice.matcher is not None and row.mask is not None:
            voice.matcher.fill(row.mask)
            if voice.matcher.is_done:
                row.banned = ()  # nothing but an end can come, however early
        return row

    def _accept(self, work: Work, voice: Voice, sampled: Sampled) -> None:
        request_id = work.sequence.request.request_id
        if work.sequence.phase is not Phase.RUNNING:
            return  # another choice of its request has failed just now
        if voice.failure is not None or sampled.token is None:
            reason = voice.failure or sampled.failure or "no token was possible"
            self._fail(request_id, EngineFailed(reason, engine="native"))
            return
        voice.output.append(sampled.token)
        if voice.matcher is not None and not voice.matcher.accept(sampled.token):
            self._fail(
                request_id, EngineFailed("the grammar refused a token it had allowed", engine="native")
            )

    def _read_prompts(self, plan: StepPlan, computed: Computed) -> None:
        """Log probabilities of prompts, for those who asked: chunk by chunk, each token under those before it."""
        for number, work in enumerate(plan.prefills, len(plan.decodes)):
            sequence = work.sequence
            if not sequence.needs_prompt_logits:
                continue
            told = self._voice(sequence).prompt_logprobs
            del told[work.start + 1 :]  # of a step that failed, or of before a preemption
            if work.start == 0:
                told[:] = [None]
            count = min(work.num_tokens, sequence.num_prompt - 1 - work.start)
            if count <= 0:
                continue
            following = iter(sequence.tokens[work.start + 1 : work.start + 1 + count])
            for logits in self.runner.each_prompt_logits(computed, number, work, count):
                tokens = [next(following) for _ in range(logits.shape[0])]
                told += prompt_logprobs(logits, tokens, sequence.request.sampling.prompt_logprobs or 0)

    # --- telling

    def _told(self, advanced: list[Advanced], sampled: dict[int, Sampled], stats: StepStats) -> StepOutput:
        plain_ids, plain_tokens = self._plain.take()
        deltas: list[tuple[RequestId, Delta]] = []
        for one in advanced:
            sequence = one.sequence
            if self.capabilities.take(one):
                self._voices.pop(sequence, None)
                continue
            deltas.append((sequence.request.request_id, self._delta(one, sampled[id(sequence)])))
            if one.end is not None:
                self._voices.pop(sequence, None)
        if self._compiled and any(one.end is not None for one in advanced):
            self._drop_grammars()
        return StepOutput(
            tuple(deltas),
            failed=self._take_failed(),
            load=self.load(stats),
            plain_ids=plain_ids,
            plain_tokens=plain_tokens,
            kv_changes=self.scheduler.take_changes(),
        )

    def _delta(self, one: Advanced, sampled: Sampled) -> Delta:
        sequence = one.sequence
        of_prompt = None
        if one.is_first and sequence.index == 0:
            voice = self._voices.get(sequence)
            if voice is not None and voice.prompt_logprobs:
                of_prompt = tuple(voice.prompt_logprobs)
                voice.prompt_logprobs = []
        return delta_of(one, sampled.logprobs, of_prompt)

    def _without_step(self) -> StepOutput | None:
        failed, changes = self._take_failed(), self.scheduler.take_changes()
        if not failed and not changes:
            return None
        return StepOutput(failed=failed, load=self.load(), kv_changes=changes)

    # --- what is under way

    def _admit_compiled(self) -> None:
        for request_id, (request, keep_blocks, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            try:
                self._admit(request, keep_blocks, future.result())
            except KvoltError as error:
                self._fail(request_id, error)
            except Exception as error:  # of the compiler's thread
                reason = f"its grammar failed to compile: {type(error).__name__}: {str(error)[:200]}"
                self._fail(request_id, EngineFailed(reason, engine="native"))

    def _admit(self, request: Request, keep_blocks: bool, compiled: CompiledGrammar) -> None:
        for given in _given(request):
            compiled.start(given)  # tokens that break it are refused here, not in a step
        self.scheduler.add(request, keep_blocks=keep_blocks)
        self._compiled[request.request_id] = compiled

    def _stop_compiling(self, request_id: RequestId) -> bool:
        """Whether it was waiting for its grammar, which nobody compiles now if nobody had begun."""
        found = self._compiling.pop(request_id, None)
        if found is None:
            return False
        _, _, future = found
        future.cancel()
        return True

    def _wait_for_grammar(self) -> None:
        """A moment, since there is nothing else to do."""
        wait([future for _, _, future in self._compiling.values()], _COMPILE_WAIT_S, FIRST_COMPLETED)

    def _drop_grammars(self) -> None:
        """Those of requests that are over. One that waits, or whose other choices wait, still needs its own."""
        here = {request.request_id for request in self.scheduler.requests()}
        for request_id in self._compiled.keys() - here:
            del self._compiled[request_id]

    def _fail(self, request_id: RequestId, error: KvoltError) -> None:
        self.scheduler.abort(request_id)
        self._forget(request_id)
        info = to_info(error)
        if not self.capabilities.fail(request_id, info):
            self._failed.append((request_id, info))

    def _take_failed(self) -> tuple[tuple[RequestId, ErrorInfo], ...]:
        failed, self._failed = tuple(self._failed), []
        return failed

    def _forget(self, request_id: RequestId) -> None:
        self._compiled.pop(request_id, None)
        gone = [sequence for sequence in self._voices if sequence.request.request_id == request_id]
        for sequence in gone:
            del self._voices[sequence]


def _given(request: Request) -> list[tuple[int, ...]]:
    """The output that a request comes with, by choice where choices differ."""
    if request.resume_choices:
        return [request.resumed(index) for index in request.open_choices]
    if request.resume or request.handoff is None or request.handoff.first_tokens is None:
        return [request.resume]
    return [(token,) for token in request.handoff.first_tokens]
