"""The sim engine passes the engine suite: on virtual time, and on a real loop with a fast step model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvolt.core.delta import Delta, StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sim import SimArguments, SimEngine
from kvolt.testing import run_virtual
from kvolt.testing.engine_suite import (
    CASES,
    abort_frees_everything,
    refuses_bad_requests,
    same_seed_same_tokens,
    streams_in_order_and_stops_at_max_tokens,
    two_hundred_at_once,
)

SPEC = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
SMALL = SimArguments(context_length=256, kv_blocks=400, max_num_seqs=48, max_batch_tokens=64)
FAST = SimArguments(context_length=256, max_num_seqs=48, latency=LatencyModel(base_s=0.0001))


class SimHarness:
    def __init__(self, arguments: SimArguments, kind: type[SimEngine] = SimEngine) -> None:
        self._arguments = arguments
        self._kind = kind

    def engine(self) -> SimEngine:
        return self._kind(SPEC, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_virtual_time(case) -> None:
    run_virtual(lambda: case(SimHarness(SMALL)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
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
        self._running.pop(request_id, None)


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


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (_EndsTwice, streams_in_order_and_stops_at_max_tokens),
        (_PlainAndDelta, streams_in_order_and_stops_at_max_tokens),
        (_LosesAToken, two_hundred_at_once),
        (_KeepsBlocks, abort_frees_everything),
        (_GoesOnAfterAbort, abort_frees_everything),
        (_TakesEverything, refuses_bad_requests),
        (_RandomTokens, same_seed_same_tokens),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_suite_finds_a_broken_engine(kind, case) -> None:
    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        run_virtual(lambda: case(SimHarness(SMALL, kind)))
