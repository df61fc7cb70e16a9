"""SteppedEngine: base class of engines that compute one token of each sequence per call, without a scheduler.

For a model that is a function in this process. A subclass implements `load_model` and `next_tokens`, which run in a
thread, one call at a time (docs/tutorials/engine.md has one). Sequences run in order of arrival, at most `max_num_seqs`
at once. It reports no KV events: routers use their own routing history.
"""

from __future__ import annotations

import random
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from kvolt.core.card import Capacity, EngineInfo, ModelCard
from kvolt.core.errors import ConfigError, Unsupported
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role, Sampling
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.answers import Choice, ChoiceOutput, find_end
from kvolt.engines.external.base import ExternalEngine
from kvolt.engines.external.description import info_of, limits_of
from kvolt.engines.external.requests import input_tokens, refuse_extra
from kvolt.engines.wakeup import Wakeup
from kvolt.scheduler.step_plan import Limits

A = TypeVar("A", bound=msgspec.Struct)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A choice of a request that needs its next token."""

    choice: Choice
    tokens: list[int]
    """The prompt and the answer so far, also if the answer began on another worker."""
    seed: int
    """The request's, plus the index of the choice; random for a request without one."""

    @property
    def sampling(self) -> Sampling:
        return self.choice.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return self.choice.request.num_prompt_tokens

    def random(self) -> random.Random:
        """Generator for the next token: a function of seed and position, so that another worker draws the same."""
        return random.Random(f"{self.seed}/{len(self.tokens)}")


@dataclass(slots=True)
class Loaded:
    card: ModelCard
    info: EngineInfo
    limits: Limits
    vocab_size: int | None


class SteppedEngine(ExternalEngine[Loaded], Generic[A]):
    """See the module. `sampling_fields` names what `next_tokens` implements."""

    max_num_seqs = 256
    max_waiting = 1024
    vocab_size: int | None = None
    """Requests with other token ids are refused; None: not checked."""

    def __init__(self, spec: EngineSpec, arguments: A) -> None:
        super().__init__()
        if spec.role is not Role.AGGREGATED:
            raise ConfigError(
                f"{self.title} does not transfer KV", key="role", remedy="leave role aggregated"
            )
        self.spec = spec
        self.arguments = arguments
        self._sequences: dict[str, RunningSequence] = {}
        """Running and waiting ones by engine id, in order of arrival."""
        self._wakeup = Wakeup()

    @abstractmethod
    def load_model(self) -> ModelCard:
        """Load `spec.model` and describe it to frontends."""

    @abstractmethod
    def next_tokens(self, batch: Sequence[RunningSequence]) -> Sequence[int]:
        """One step: the next token of each sequence. An error ends the engine; its requests migrate."""

    async def _launch(self) -> Loaded:
        card = await self._run_blocking(self.load_model)
        capacity = Capacity(
            max_num_seqs=self.max_num_seqs, max_batch_tokens=card.context_length, kv_total_blocks=0
        )
        info = info_of(self.name, self.spec.role, card, capacity, kv_events=False)
        return Loaded(card, info, limits_of(info, card, self.max_waiting), self.vocab_size)

    async def _start_tasks(self, running: Loaded) -> None:
        self._start_task(self._run_steps, "steps")

    # --- requests

    def _check_supported(self, request: Request, running: Loaded) -> None:
        refuse_extra(request, self.title)
        if request.grammar is not None:
            raise Unsupported(f"{self.title} does not support grammars", feature="grammar")

    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        for choice in choices:
            tokens = input_tokens(request, choice.index)
            self._sequences[choice.engine_id] = RunningSequence(choice, tokens, seed + choice.index)
        self._wakeup.set()

    def _abort_choices(self, engine_ids: list[str]) -> None:
        for engine_id in engine_ids:
            self._sequences.pop(engine_id, None)
        self._wakeup.set()  # the load has changed

    # --- steps

    async def _run_steps(self) -> None:
        while True:
            if not self._sequences:
                await self._wakeup.wait()
            self._wakeup.clear()
            batch = [*islice(self._sequences.values(), self.max_num_seqs)]
            if batch:
                tokens = await self._run_blocking(partial(self.next_tokens, batch))
                for sequence, token in zip(batch, tokens, strict=True):
                    self._add_token(sequence, token)
            num_running = min(len(self._sequences), self.max_num_seqs)
            load = WorkerLoad(num_running, len(self._sequences) - num_running)
            self._step_queue.put(self._answers.take_step(load))
            await self._step_queue.wait_for_space()  # backpressure

    def _add_token(self, sequence: RunningSequence, token: int) -> None:
        choice = sequence.choice
        if choice.engine_id not in self._sequences:
            return  # aborted during the step
        sequence.tokens.append(token)
        _, finish, stop_reason = find_end(choice, [token], self.card.eos_token_ids)
        self._answers.add_output(choice, ChoiceOutput((token,), finish, stop_reason))
        if finish is not None:
            del self._sequences[choice.engine_id]
