"""SteppedEngine: the core tier of the suite with a model of a few lines, and which sequences are in a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.remote.lab import greedy
from tests.waits import MUST_HAPPEN_S

from kvolt.core.card import ModelCard
from kvolt.core.errors import ConfigError, EngineFailed, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Role, Sampling
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.stepped import RunningSequence, SteppedEngine
from kvolt.testing.engines.answer_cases import logprobs_match_the_request, prompt_logprobs_come_once
from kvolt.testing.engines.harness import NotRun, engine_run
from kvolt.testing.engines.suite import CASES

END, VOCAB_SIZE = 5, 1000
AFTER_END = 999
NEEDS_LOGPROBS = (logprobs_match_the_request, prompt_logprobs_come_once)


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: int = 256


class Toy(SteppedEngine[Arguments]):
    """Draws one of a few tokens; after a prompt that ends with AFTER_END one of them is END."""

    name, title, vocab_size = "toy", "Toy", VOCAB_SIZE
    sampling_fields = frozenset({"temperature", "seed", "num_choices"})

    def __init__(self, spec: EngineSpec, arguments: Arguments) -> None:
        super().__init__(spec, arguments)
        self.max_num_seqs = arguments.max_num_seqs
        self.batches: list[list[str]] = []
        self.started, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.error: Exception | None = None

    def load_model(self) -> ModelCard:
        return ModelCard(
            name="toy", tokenizer_json=b"", context_length=256, block_size=16, eos_token_ids=(END,)
        )

    def next_tokens(self, batch: Sequence[RunningSequence]) -> list[int]:
        self.batches.append([each.choice.request.request_id for each in batch])
        self.started.set()
        assert self.may_end.wait(MUST_HAPPEN_S)
        if self.error is not None:
            raise self.error
        return [self._next_token(each) for each in batch]

    def _next_token(self, sequence: RunningSequence) -> int:
        num_output = len(sequence.tokens) - sequence.num_prompt_tokens
        may_end = sequence.tokens[sequence.num_prompt_tokens - 1] == AFTER_END and num_output > 1
        tokens = [END, *range(20, 23)] if may_end else [*range(20, 30)]
        if sequence.sampling.temperature == 0:
            return tokens[(sum(sequence.tokens) + num_output) % len(tokens)]
        return sequence.random().choice(tokens)


class ToyHarness:
    def __init__(self, **arguments: Any) -> None:
        self._arguments = Arguments(**arguments)
        self.engines: list[Toy] = []

    def engine(self) -> Toy:
        self.engines.append(Toy(EngineSpec(model="toy", role=Role.AGGREGATED), self._arguments))
        return self.engines[-1]

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        """With other lengths of the answers of seeds 1 and 2: nothing but the length of the prompt changes the draw."""
        for length in range(2, 100):
            prompt = (*self.prompt(length), AFTER_END)
            lengths = [_num_tokens(prompt, seed) for seed in (1, 2)]
            if max(lengths) <= 30 and lengths[0] != lengths[1]:
                return prompt
        raise AssertionError("no such prompt")


def _num_tokens(prompt: tuple[int, ...], seed: int) -> int:
    """Length of an answer."""
    toy = Toy(EngineSpec(model="toy", role=Role.AGGREGATED), Arguments())
    [choice] = toy._answers.open(replace(greedy("r"), token_ids=prompt, sampling=Sampling(seed=seed)))
    sequence = RunningSequence(choice, [*prompt], seed)
    while sequence.tokens[-1] != END:
        sequence.tokens += toy.next_tokens([sequence])
    return len(sequence.tokens) - len(prompt)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_core_tier(case: Any) -> None:
    with pytest.raises(NotRun) if case in NEEDS_LOGPROBS else nullcontext():
        await case(ToyHarness())


async def test_a_step_has_the_oldest_sequences_up_to_the_limit() -> None:
    harness = ToyHarness(max_num_seqs=2)
    async with engine_run(harness) as run:
        await run.finish(*[run.submit(greedy(name, max_tokens=3)) for name in ("a", "b", "c")])
    steps = [tuple(batch) for batch in harness.engines[0].batches]
    assert steps == [("a", "b")] * 3 + [("c",)] * 3


async def test_a_token_of_a_request_that_was_aborted_during_the_step_is_dropped() -> None:
    harness = ToyHarness()
    async with engine_run(harness) as run:
        toy = harness.engines[0]
        toy.may_end.clear()
        gone = run.submit(greedy("gone"))
        await asyncio.to_thread(toy.started.wait, MUST_HAPPEN_S)
        run.abort(gone)
        toy.may_end.set()
        await run.answer(greedy("next", max_tokens=2))
    assert not gone.tokens
    assert toy.batches == [["gone"], ["next"], ["next"]]


async def test_an_error_of_a_step_ends_the_engine() -> None:
    toy = ToyHarness().engine()
    await toy.start()
    toy.error = RuntimeError("no memory")
    toy.submit(greedy("r"))
    with pytest.raises(EngineFailed, match="Toy failed: no memory"):
        async for _ in toy.steps():
            pass
    await toy.close()


async def test_what_it_cannot_follow_is_refused() -> None:
    async with engine_run(ToyHarness()) as run:
        request = run.request("r")
        with pytest.raises(Unsupported):
            run.engine.submit(replace(request, grammar=Grammar(GrammarKind.REGEX, "a")))
        with pytest.raises(Unsupported):
            run.engine.submit(replace(request, extra={"vllm_xargs": {}}))


def test_a_role_that_transfers_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="Toy does not transfer KV"):
        Toy(EngineSpec(model="toy", role=Role.PREFILL), Arguments())
