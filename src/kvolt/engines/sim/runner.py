"""SimRunner: the simulated model in a step: which tokens come out of it, and which blocks it fills.

Owns what each choice has to say and the bytes of the blocks. Knows no scheduling, no time and no streams.

A token follows from the tokens that the sequence has and from the KV that it reads, as of a real model. A prompt
reads all its blocks. A decode step reads `_READ_PER_STEP` of them in rotation, so that a token costs the same
whatever its context: KV that is overwritten under a running answer changes it within some steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvolt.core.delta import Delta
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.sim.answer import fold, next_state, prompt_state
from kvolt.engines.sim.kv import ExpectedKv, SimMemory
from kvolt.engines.sim.script import Choice, Speaker
from kvolt.scheduler.sequence import Phase, Sequence
from kvolt.scheduler.step_output import delta_of
from kvolt.scheduler.step_plan import Advanced, StepPlan, Work

_RUNNING = Phase.RUNNING
_READ_PER_STEP = 4
"""Blocks that a decode step of one sequence reads."""


class _Voice:
    """What a sequence says next: the rolling hash of its tokens, and what its blocks should hold."""

    __slots__ = ("_num_heard", "_state", "choice", "confusion", "expected", "next_read")

    def __init__(self, choice: Choice, expected: ExpectedKv | None) -> None:
        self.choice = choice
        self.expected = expected
        self.confusion = 0
        """Not 0 once it has read a block that is not what it should be."""
        self.next_read = 0
        self._num_heard = 0
        self._state = choice.seed

    def hear(self, sequence: Sequence) -> None:
        """Take in the tokens that the sequence has got since. On paper prompts have none."""
        tokens = sequence.tokens
        if self._num_heard == len(tokens) - 1:
            self._state = next_state(self._state, tokens[-1])
        elif self._num_heard:
            self._state = fold(self._state, tokens[self._num_heard :])
        else:
            num_prompt = sequence.num_prompt
            if self.expected is not None:
                self._state = prompt_state(tokens[:num_prompt], self.choice.seed)
            self._state = fold(self._state, tokens[num_prompt:])
        self._num_heard = len(tokens)

    def say(self, sequence: Sequence) -> int:
        """The next token."""
        self.hear(sequence)
        return self.choice.token(sequence.num_output, self._state, self.confusion)

    def say_many(self, sequence: Sequence, count: int) -> list[int]:
        """The next `count` tokens."""
        self.hear(sequence)
        state, said = self._state, []
        for position in range(sequence.num_output, sequence.num_output + count):
            token = self.choice.token(position, state, self.confusion)
            said.append(token)
            state = next_state(state, token)
        return said


class SimRunner:
    """See the module."""

    def __init__(self, speaker: Speaker, memory: SimMemory | None, model: str, block_size: int) -> None:
        """Without a memory blocks hold nothing, and nobody looks."""
        self._speaker = speaker
        self._memory = memory
        self._model = model
        self._block_size = block_size
        self._silent: dict[RequestId, dict[int, Choice]] = {}
        """Choices that were not computed yet, by request and index. The others are with their sequences."""

    def add(self, request: Request) -> None:
        """InvalidRequest for what no answer could keep to."""
        choices = self._speaker.choices(request)
        self._silent[request.request_id] = {index: choices[index] for index in request.open_choices}

    def forget(self, request_id: RequestId) -> None:
        self._silent.pop(request_id, None)

    def run(self, plan: StepPlan) -> list[int]:
        """Compute a step: the tokens sampled, decodes then prefills. Of those that were aborted they say nothing."""
        return self._decode(plan.decodes) + self._prefill(plan.prefills)

    def _decode(self, decodes: Iterable[Work]) -> list[int]:
        """The next token of each; the block that it fills, if it does."""
        tokens: list[int] = []
        block_size = self._block_size
        has_memory = self._memory is not None
        for work in decodes:
            sequence = work.sequence
            if has_memory:
                self._read_some(work)
                if not (work.start + 1) % block_size:
                    self.fill(work)
            tokens.append(sequence.voice.say(sequence))
        return tokens

    def speak(self, plan: StepPlan, count: int) -> list[list[int]]:
        """The next `count` tokens of each decode. Where blocks hold nothing, neither do answers."""
        if self._memory is None:
            return [[0] * count for _ in plan.decodes]
        for work in plan.decodes:
            self._read_some(work)
        return [work.sequence.voice.say_many(work.sequence, count) for work in plan.decodes]

    def _prefill(self, prefills: list[Work]) -> list[int]:
        """Read the blocks before, fill those that are computed, then sample."""
        for work in prefills:
            if work.sequence.phase is _RUNNING:
                self._open_voice(work.sequence)
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
            tokens.append(sequence.voice.say(sequence))
        return tokens

    def _open_voice(self, sequence: Sequence) -> None:
        voice = sequence.voice
        if voice is None:
            expected = None
            if self._memory is not None:
                expected = ExpectedKv(self._model, self._block_size, sequence.request)
            voice = sequence.voice = _Voice(self._take_silent(sequence), expected)
        voice.confusion = 0  # it reads all its blocks again

    def fill(self, work: Work) -> None:
        """Write the blocks that these tokens complete."""
        sequence, block_size = work.sequence, self._block_size
        memory = self._memory
        if memory is None or sequence.phase is not _RUNNING:
            return  # or aborted during the step: it has no blocks any more
        num_full = (work.start + work.num_tokens) // block_size
        voice: _Voice = sequence.voice
        assert voice.expected is not None
        voice.expected.reach(sequence.tokens, num_full)
        fingerprints = voice.expected.fingerprints
        for position in range(work.start // block_size, num_full):
            memory.compute(sequence.blocks[position], fingerprints[position], voice.confusion)

    def _read_some(self, work: Work) -> None:
        sequence = work.sequence
        num_full = work.start // self._block_size
        if not num_full or sequence.phase is not _RUNNING:
            return
        voice: _Voice = sequence.voice
        start = voice.next_read if voice.next_read < num_full else 0
        voice.next_read = min(start + _READ_PER_STEP, num_full)
        self._read(sequence, start, voice.next_read)

    def _read(self, sequence: Sequence, start: int, end: int) -> None:
        """Attend to the blocks [start, end) of a sequence."""
        if self._memory is None or start >= end:
            return
        voice: _Voice = sequence.voice
        assert voice.expected is not None
        voice.expected.reach(sequence.tokens, end)
        expected = voice.expected.fingerprints[start:end]
        voice.confusion = self._memory.confusion(sequence.blocks[start:end], expected) or voice.confusion

    def _take_silent(self, sequence: Sequence) -> Choice:
        request_id = sequence.request.request_id
        silent = self._silent[request_id]
        choice = silent.pop(sequence.index)
        if not silent:
            del self._silent[request_id]
        return choice

    def delta(self, one: Advanced) -> Delta:
        """A new token, with what was asked to be told of it."""
        sequence = one.sequence
        of_prompt = None
        if one.is_first and not sequence.index:
            of_prompt = self._speaker.prompt_logprobs(sequence.request)
        choice: Choice = sequence.voice.choice
        return delta_of(one, choice.logprobs(sequence.num_output - 1, one.token), of_prompt)
