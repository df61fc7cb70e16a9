"""SimRunner: computes the steps of the simulated model: samples tokens and fills blocks.

Owns the answer of each choice and the content of the blocks. Knows no scheduling, time or streams.

As in a real model, a token depends on the tokens of the sequence and on the KV that it reads. A prefill reads all its
blocks. A decode step reads `_READ_PER_STEP` of them in rotation, so that its cost does not depend on the context:
KV overwritten during an answer changes the answer within some steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvolt.core.delta import Delta
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.sim.kv import ExpectedKv, SimMemory
from kvolt.engines.sim.script import AnswerScripts, Choice, fold, next_state, prompt_state
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.step_output import delta_of
from kvolt.scheduler.step_plan import NewToken, StepPlan, Work

_RUNNING = Phase.RUNNING
_READ_PER_STEP = 4
"""Blocks read by a decode step of one sequence."""


class StepObserver(Protocol):
    """Called once per step, or once per run of steps that are simulated as one event. Must be fast and must
    not raise."""

    def on_step(self, plan: StepPlan, time_s: float, load: WorkerLoad) -> None:
        """`plan` was computed in `time_s`; `load` is the engine's load now."""


class _AnswerState:
    """State of a sequence's answer: the rolling hash of its tokens, and the expected content of its blocks."""

    __slots__ = ("_num_hashed", "_state", "choice", "corruption", "expected", "next_read")

    def __init__(self, choice: Choice, expected: ExpectedKv | None) -> None:
        self.choice = choice
        self.expected = expected
        self.corruption = 0
        """Nonzero once it has read a wrong block."""
        self.next_read = 0
        self._num_hashed = 0
        self._state = choice.seed

    def _hash_tokens(self, sequence: Sequence) -> None:
        """Update the hash with the tokens added since the last call. Prompts of a trace have no tokens."""
        tokens = sequence.tokens
        if self._num_hashed == len(tokens) - 1:
            self._state = next_state(self._state, tokens[-1])
        elif self._num_hashed:
            self._state = fold(self._state, tokens[self._num_hashed :])
        else:
            num_prompt = sequence.num_prompt
            if self.expected is not None:
                self._state = prompt_state(tokens[:num_prompt], self.choice.seed)
            self._state = fold(self._state, tokens[num_prompt:])
        self._num_hashed = len(tokens)

    def next_token(self, sequence: Sequence) -> int:
        """Generate the next token."""
        self._hash_tokens(sequence)
        return self.choice.token(sequence.num_output, self._state, self.corruption)

    def next_tokens(self, sequence: Sequence, count: int) -> list[int]:
        """Generate the next `count` tokens."""
        self._hash_tokens(sequence)
        state, tokens = self._state, []
        for position in range(sequence.num_output, sequence.num_output + count):
            token = self.choice.token(position, state, self.corruption)
            tokens.append(token)
            state = next_state(state, token)
        return tokens


class SimRunner:
    """See the module."""

    def __init__(self, scripts: AnswerScripts, memory: SimMemory | None, model: str, block_size: int) -> None:
        """`memory`: None if blocks have no content."""
        self._scripts = scripts
        self._memory = memory
        self._model = model
        self._block_size = block_size
        self._unstarted: dict[RequestId, dict[int, Choice]] = {}
        """Choices that have not started, by request and index. Others are in the state of their sequence."""

    def add(self, request: Request) -> None:
        """Add a request. InvalidRequest if no answer can satisfy it."""
        choices = self._scripts.choices(request)
        self._unstarted[request.request_id] = {index: choices[index] for index in request.open_choices}

    def drop_request(self, request_id: RequestId) -> None:
        self._unstarted.pop(request_id, None)

    def run(self, plan: StepPlan) -> list[int]:
        """Compute a step; returns the sampled tokens of decodes, then prefills. Tokens of aborted sequences
        are arbitrary."""
        return self._decode(plan.decodes) + self._prefill(plan.prefills)

    def _decode(self, decodes: Iterable[Work]) -> list[int]:
        """Sample the next token of each decode and fill the blocks that become complete."""
        tokens: list[int] = []
        block_size = self._block_size
        has_memory = self._memory is not None
        for work in decodes:
            sequence = work.sequence
            if has_memory:
                self._read_some(work)
                if not (work.start + 1) % block_size:
                    self.fill(work)
            tokens.append(sequence.sampling_state.next_token(sequence))
        return tokens

    def run_decodes(self, plan: StepPlan, count: int) -> list[list[int]]:
        """The next `count` tokens of each decode. Without block content all tokens are 0."""
        if self._memory is None:
            return [[0] * count for _ in plan.decodes]
        for work in plan.decodes:
            self._read_some(work)
        return [work.sequence.sampling_state.next_tokens(work.sequence, count) for work in plan.decodes]

    def _prefill(self, prefills: list[Work]) -> list[int]:
        """Read the blocks before each chunk, fill the computed ones, then sample."""
        for work in prefills:
            if work.sequence.phase is _RUNNING:
                self._start_prefill(work.sequence)
                self._read(work.sequence, 0, work.start // self._block_size)
                self.fill(work)
        tokens: list[int] = []
        for work in prefills:
            if not work.samples:
                continue
            sequence = work.sequence
            if sequence.phase is not _RUNNING:
                tokens.append(0)
                continue
            size = self._block_size
            self._read(sequence, work.start // size, len(sequence.tokens) // size)
            tokens.append(sequence.sampling_state.next_token(sequence))
        return tokens

    def _start_prefill(self, sequence: Sequence) -> None:
        state = sequence.sampling_state
        if state is None:
            expected = None
            if self._memory is not None:
                expected = ExpectedKv(self._model, self._block_size, sequence.request)
            state = sequence.sampling_state = _AnswerState(self._pop_choice(sequence), expected)
        state.corruption = 0  # a prefill reads all blocks again

    def fill(self, work: Work) -> None:
        """Fill the blocks that these tokens complete."""
        sequence, block_size = work.sequence, self._block_size
        memory = self._memory
        if memory is None or sequence.phase is not _RUNNING:
            return  # a sequence aborted during the step has no blocks
        num_full = (work.start + work.num_tokens) // block_size
        state: _AnswerState = sequence.sampling_state
        assert state.expected is not None
        state.expected.reach(sequence.tokens, num_full)
        fingerprints = state.expected.fingerprints
        for position in range(work.start // block_size, num_full):
            memory.compute(sequence.blocks[position], fingerprints[position], state.corruption)

    def _read_some(self, work: Work) -> None:
        sequence = work.sequence
        num_full = work.start // self._block_size
        if not num_full or sequence.phase is not _RUNNING:
            return
        state: _AnswerState = sequence.sampling_state
        start = state.next_read if state.next_read < num_full else 0
        state.next_read = min(start + _READ_PER_STEP, num_full)
        self._read(sequence, start, state.next_read)

    def _read(self, sequence: Sequence, start: int, end: int) -> None:
        """Read and verify the blocks [start, end) of a sequence."""
        if self._memory is None or start >= end:
            return
        state: _AnswerState = sequence.sampling_state
        assert state.expected is not None
        state.expected.reach(sequence.tokens, end)
        expected = state.expected.fingerprints[start:end]
        state.corruption = self._memory.check(sequence.blocks[start:end], expected) or state.corruption

    def _pop_choice(self, sequence: Sequence) -> Choice:
        request_id = sequence.request.request_id
        choices = self._unstarted[request_id]
        choice = choices.pop(sequence.index)
        if not choices:
            del self._unstarted[request_id]
        return choice

    def delta(self, new: NewToken) -> Delta:
        """The delta of a new token, with the requested log probabilities."""
        sequence = new.sequence
        prompt_logprobs = None
        if new.is_first and not sequence.index:
            prompt_logprobs = self._scripts.prompt_logprobs(sequence.request)
        choice: Choice = sequence.sampling_state.choice
        return delta_of(new, choice.logprobs(sequence.num_output - 1, new.token), prompt_logprobs)
