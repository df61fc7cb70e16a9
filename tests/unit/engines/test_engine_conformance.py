"""The sim engine passes the engine suite: on virtual time, and on a real loop with a fast step model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import EOS, tokenizer_json
from kvolt.scheduler.step_plan import Scheduling
from kvolt.testing import run_virtual
from kvolt.testing.engines.answer_cases import (
    choices_end_separately,
    ends_at_eos,
    eos_as_a_stop_token,
    logprobs_match_the_request,
    prompt_logprobs_come_once,
    respects_ignore_eos,
    respects_min_tokens,
    stops_at_a_stop_token,
)
from kvolt.testing.engines.cancel_cases import (
    abort_during_prefill,
    abort_frees_everything,
    abort_storms,
    abort_while_waiting,
)
from kvolt.testing.engines.suite import (
    each_choice_resumes_after_its_own_tokens,
    rejects_bad_requests,
    same_seed_same_tokens,
    streams_in_order_and_stops_at_max_tokens,
    two_hundred_concurrent_requests,
)
from kvolt.testing.engines.tiers import TIERS, suites_for

SPEC = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
SMALL = SimArguments(
    context_length=256,
    kv_blocks=200,
    max_num_seqs=48,
    max_batch_tokens=64,
    answer_from_prompt=True,
    hold_s=2.0,
)
SCARCE = replace(SMALL, kv_blocks=20)
"""Room for little more than one request of the longest: the others wait, or are preempted."""
PROMPTS_FIRST = replace(SCARCE, scheduling=Scheduling.SGLANG)
LINKED = replace(SMALL, link_in_bytes_per_s=1e9, link_latency_s=0.0001)
"""Two milliseconds for a block of two megabytes, and half of that on its way out."""
FAST = SimArguments(
    context_length=256,
    kv_blocks=200,
    max_num_seqs=48,
    latency=LatencyModel(base_s=0.0001),
    answer_from_prompt=True,
    hold_s=0.3,
)
ENDING = tuple(Tokenizer.from_buffer(tokenizer_json()).encode("<say> good day<or/> good night é</say>").ids)


class SimHarness:
    def __init__(self, arguments: SimArguments, kind: type[SimEngine] = SimEngine) -> None:
        self._arguments = arguments
        self._kind = kind

    def engine(self) -> SimEngine:
        return self._kind(SPEC, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return ENDING


ALL = [case for tier in TIERS for case in tier.cases]


async def test_it_offers_every_tier() -> None:
    assert list(suites_for(SimHarness(SMALL).engine())) == ALL


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    "arguments",
    [SMALL, SCARCE, PROMPTS_FIRST, LINKED],
    ids=["small", "scarce", "prompts-first", "linked"],
)
def test_on_virtual_time(case, arguments: SimArguments) -> None:
    run_virtual(lambda: case(SimHarness(arguments)))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
async def test_on_a_real_loop(case) -> None:
    await case(SimHarness(FAST))


class _Changed(SimEngine):
    """An engine with a fault in its steps."""

    def change(self, step: StepOutput) -> StepOutput:
        raise NotImplementedError

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for step in super().steps():
            yield self.change(step)


class _EndsTwice(_Changed):
    def change(self, step: StepOutput) -> StepOutput:
        ends = tuple(pair for pair in step.deltas if pair[1].finish is not None)
        return StepOutput(step.deltas + ends, plain_ids=step.plain_ids, plain_tokens=step.plain_tokens)


class _PlainAndDelta(_Changed):
    def change(self, step: StepOutput) -> StepOutput:
        extra = tuple((request_id, Delta(token_ids=(9,))) for request_id in step.plain_ids)
        return StepOutput(step.deltas + extra, plain_ids=step.plain_ids, plain_tokens=step.plain_tokens)


class _LosesAToken(_Changed):
    def change(self, step: StepOutput) -> StepOutput:
        return StepOutput(
            step.deltas, load=step.load, plain_ids=step.plain_ids[1:], plain_tokens=step.plain_tokens[1:]
        )


class _KeepsBlocks(SimEngine):
    def abort(self, request_id: RequestId) -> None:
        scheduler = self._scheduler
        for sequence in scheduler.planner.running:
            if sequence.request.request_id == request_id:
                scheduler.pool.retain(sequence.blocks)
        super().abort(request_id)


class _GoesOnAfterAbort(SimEngine):
    def abort(self, request_id: RequestId) -> None:
        pass


class _TakesEverything(SimEngine):
    def submit(self, request) -> None:
        pass


class _RandomTokens(_Changed):
    def change(self, step: StepOutput) -> StepOutput:
        changed = tuple((hash((token, id(step))) % 900) for token in step.plain_tokens)
        return StepOutput(step.deltas, load=step.load, plain_ids=step.plain_ids, plain_tokens=changed)


class _ChangedDeltas(_Changed):
    """With a fault in its deltas."""

    def change(self, step: StepOutput) -> StepOutput:
        changed = tuple((request_id, self.change_delta(delta)) for request_id, delta in step.deltas)
        return replace(step, deltas=changed)

    def change_delta(self, delta: Delta) -> Delta:
        raise NotImplementedError


class _KeepsEosToItself(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        if delta.token_ids != (EOS,) or delta.usage is None:
            return delta
        usage = replace(delta.usage, completion_tokens=delta.usage.completion_tokens - 1)
        return replace(delta, token_ids=(), usage=usage)


class _CallsEveryEndALength(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        return replace(delta, finish=delta.finish and FinishReason.LENGTH)


class _GivesNoReason(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        return replace(delta, stop_reason=None)


class _GivesEosAsAReason(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        return replace(delta, stop_reason=EOS if delta.token_ids == (EOS,) else delta.stop_reason)


class _AddsUsageUp(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        if delta.usage is None:
            return delta
        return replace(delta, usage=replace(delta.usage, completion_tokens=99))


class _LeastLikelyFirst(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        turned = [replace(entry, top=entry.top[::-1]) for entry in delta.logprobs or ()]
        return replace(delta, logprobs=tuple(turned) or None)


class _ForgetsLogprobs(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        return replace(delta, logprobs=None)


class _RepeatsPromptLogprobs(_ChangedDeltas):
    def change_delta(self, delta: Delta) -> Delta:
        return replace(delta, prompt_logprobs=delta.prompt_logprobs or (None,))


class _OtherStops(SimEngine):
    """Does not look at one of the stop conditions."""

    def seen(self, stop: StopConditions) -> StopConditions:
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        super().submit(replace(request, stop=self.seen(request.stop)))


class _NoMinimum(_OtherStops):
    def seen(self, stop: StopConditions) -> StopConditions:
        return replace(stop, min_tokens=0)


class _NoStopTokens(_OtherStops):
    def seen(self, stop: StopConditions) -> StopConditions:
        return replace(stop, stop_token_ids=())


class _AlwaysEos(_OtherStops):
    def seen(self, stop: StopConditions) -> StopConditions:
        return replace(stop, ignore_eos=False)


class _BeginsAnew(SimEngine):
    def submit(self, request: Request) -> None:
        super().submit(replace(request, prior_tokens_by_choice=()))


class _NeverEos(_OtherStops):
    def seen(self, stop: StopConditions) -> StopConditions:
        return replace(stop, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (_EndsTwice, streams_in_order_and_stops_at_max_tokens),
        (_PlainAndDelta, streams_in_order_and_stops_at_max_tokens),
        (_LosesAToken, two_hundred_concurrent_requests),
        (_KeepsBlocks, abort_frees_everything),
        (_GoesOnAfterAbort, abort_frees_everything),
        (_KeepsBlocks, abort_during_prefill),
        (_KeepsBlocks, abort_storms),
        (_GoesOnAfterAbort, abort_while_waiting),
        (_TakesEverything, rejects_bad_requests),
        (_RandomTokens, same_seed_same_tokens),
        (_KeepsEosToItself, ends_at_eos),
        (_CallsEveryEndALength, ends_at_eos),
        (_GivesNoReason, stops_at_a_stop_token),
        (_GivesEosAsAReason, eos_as_a_stop_token),
        (_AddsUsageUp, choices_end_separately),
        (_LeastLikelyFirst, logprobs_match_the_request),
        (_ForgetsLogprobs, logprobs_match_the_request),
        (_RepeatsPromptLogprobs, prompt_logprobs_come_once),
        (_NoMinimum, respects_min_tokens),
        (_NoStopTokens, stops_at_a_stop_token),
        (_AlwaysEos, respects_ignore_eos),
        (_NeverEos, ends_at_eos),
        (_BeginsAnew, each_choice_resumes_after_its_own_tokens),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_finds_a_broken_engine(kind, case) -> None:
    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        run_virtual(lambda: case(SimHarness(SMALL, kind)))
