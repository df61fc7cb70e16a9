"""SimRunner: the simulated model in a step: which tokens come out of it, and which blocks it fills.

Owns what each choice has to say and the bytes of the blocks. Knows no scheduling, no time and no streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from kvolt.core.delta import Delta
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.sequence import Phase, Sequence
from kvolt.engines.sim_kv import SimMemory
from kvolt.engines.sim_script import Choice, Speaker
from kvolt.engines.step_plan import Advanced, StepPlan, Work
from kvolt.engines.step_telling import delta_of

_RUNNING = Phase.RUNNING


@dataclass(slots=True)
class _Voice:
    """What a sequence says next, and what of."""

    choice: Choice
    say: Callable[[], int]


class SimRunner:
    """See the module."""

    def __init__(self, speaker: Speaker, memory: SimMemory | None, block_size: int) -> None:
        """Without a memory blocks hold nothing, and nobody looks."""
        self._speaker = speaker
        self._memory = memory
        self._block_size = block_size
        self._silent: dict[RequestId, dict[int, Choice]] = {}
        """Choices that have said nothing yet, by request and index. The others are with their sequences."""

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
        for work in decodes:
            if not (work.start + 1) % block_size:
                self.fill(work)
            tokens.append(work.sequence.voice.say())
        return tokens

    def speak(self, plan: StepPlan, count: int) -> list[list[int]]:
        """The next `count` tokens of each decode. Where blocks hold nothing, neither do answers."""
        if self._memory is None:
            return [[0] * count for _ in plan.decodes]
        return [[*islice(iter(work.sequence.voice.say, None), count)] for work in plan.decodes]

    def _prefill(self, prefills: Iterable[Work]) -> list[int]:
        """Fill the blocks. Who has all its tokens computed reads them, and says its next token."""
        tokens: list[int] = []
        for work in prefills:
            sequence = work.sequence
            self.fill(work)
            if not work.samples:
                continue
            if sequence.phase is not _RUNNING:
                tokens.append(0)
                continue
            voice = sequence.voice = self._voice(sequence)
            tokens.append(voice.say())
        return tokens

    def fill(self, work: Work) -> None:
        """Write the blocks that these tokens complete."""
        sequence, block_size = work.sequence, self._block_size
        memory = self._memory
        if memory is None or sequence.phase is not _RUNNING:
            return  # or aborted during the step: it has no blocks any more
        num_full = (work.start + work.num_tokens) // block_size
        sequence.naming.reach(sequence.tokens, num_full)
        keys = sequence.naming.names.keys
        for position in range(work.start // block_size, num_full):
            memory.compute(sequence.blocks[position], keys[position])

    def _voice(self, sequence: Sequence) -> _Voice:
        """Its voice, after it has read all its blocks."""
        confusion = 0
        if self._memory is not None:
            num_full = len(sequence.tokens) // self._block_size
            keys = sequence.naming.names.keys
            confusion = self._memory.confusion(sequence.blocks[:num_full], keys[:num_full])
        choice = sequence.voice.choice if sequence.voice is not None else self._take_silent(sequence)
        return _Voice(choice, choice.tokens(sequence.num_output, confusion).__next__)

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
