"""A real vLLM of several processes: ranks that share a model's layers or heads, and ranks that each have it whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kept import SMALL, Kept, VllmHarness
from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role, RoutingHints, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.testing.engines.harness import Replica, Run, block_hashes, engine_run

BLOCK = SMALL["block_size"]
NUM_BLOCKS = SMALL["num_gpu_blocks_override"] - 1
"""One of them stands for nothing."""
SETUPS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
}


class ByRank(VllmEngine):
    """Keeps what each rank tells of itself apart, as routers do."""

    replicas: dict[int, Replica]
    loads: dict[int, list[WorkerLoad]]

    async def steps(self) -> AsyncIterator[StepOutput]:  # type: ignore[override]
        self.replicas, self.loads = defaultdict(Replica), defaultdict(list)
        async for step in super().steps():
            rank = step.load.dp_rank if step.load is not None else 0
            for change in step.kv_changes:
                self.replicas[rank].apply(change)
            if step.load is not None:
                self.loads[rank].append(step.load)
            yield StepOutput(
                step.deltas, step.failed, step.load, step.plain_ids, step.plain_tokens, kv_changes=()
            )


class Harness(VllmHarness):
    def engine(self) -> ByRank:
        spec = EngineSpec(model=str(self.kept.model), role=self.kept.role)
        return ByRank(spec, self.kept.arguments, launcher=self.kept._again)


@pytest.fixture(scope="module", params=SETUPS)
async def several(request: pytest.FixtureRequest, tiny: Path) -> AsyncIterator[Kept]:
    arguments = VllmArguments(served_name="tiny", engine_args=SMALL | SETUPS[request.param])
    kept = Kept(Role.AGGREGATED, arguments, tiny)
    await kept.make_ready()
    yield kept
    await kept.close()


@pytest.fixture
async def run(several: Kept) -> AsyncIterator[Run]:
    await several.make_ready()
    async with engine_run(Harness(several)) as run:
        yield run


def is_data(kept: Kept) -> bool:
    return "data_parallel_size" in kept.arguments.engine_args


def engine_of(run: Run) -> ByRank:
    assert isinstance(run.engine, ByRank)
    return run.engine


def asked(name: str, start: int = 20, rank: int | None = None, **sampling: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        model="tiny",
        token_ids=tuple(range(start, start + 70)),
        stop=StopConditions(max_tokens=8, ignore_eos=True),
        sampling=Sampling(**sampling or {"temperature": 0.0}),
        routing=RoutingHints(pinned_dp_rank=rank),
    )


async def test_it_says_what_it_is(several: Kept, run: Run) -> None:
    assert run.info.dp_ranks == ((0, 1) if is_data(several) else (0,))
    capacity = run.info.capacity
    assert capacity.kv_total_blocks == NUM_BLOCKS, "of each rank: a request has those of one"
    assert capacity.max_num_seqs == SMALL["max_num_seqs"]
    assert run.info.features == ("KvEvents",)


async def test_answers_are_those_of_one_process(several: Kept, kept: Kept) -> None:
    requests = [asked(f"r{start}", start) for start in range(20, 24)]
    requests += [asked(f"s{start}", start, seed=start, temperature=0.9) for start in range(24, 28)]
    answers: list[list[list[int]]] = []
    for each in (several, kept):
        await each.make_ready()
        async with engine_run(Harness(each)) as run:
            told = [run.submit(request) for request in requests]
            await run.finish(*told)
            answers.append([answer.tokens[0] for answer in told])
    assert answers[0] == answers[1]


async def test_seeded_answer_resumes(run: Run) -> None:
    whole = asked("whole", seed=3, temperature=0.9)
    tokens = (await run.answer(whole)).tokens[0]
    rest = await run.answer(replace(whole, request_id=RequestId("rest"), prior_tokens=tuple(tokens[:4])))
    assert rest.tokens[0] == tokens[4:]


async def test_blocks_and_load_are_reported_per_rank(several: Kept, run: Run) -> None:
    engine, names = engine_of(run), block_hashes(asked("any"), BLOCK)
    ranks = run.info.dp_ranks
    for rank in reversed(ranks):
        pinned = rank if is_data(several) else None
        assert engine.replicas[rank].num_leading(names) == 0, "another rank's blocks are told as its own"
        first = await run.answer(asked(f"first-{rank}", rank=pinned))
        assert first.cached == 0
        await run.settle()
        assert engine.replicas[rank].num_leading(names) == 2
        assert {load.dp_rank for load in engine.loads[rank]} == {rank}
        assert {load.kv_total_blocks for load in engine.loads[rank]} == {NUM_BLOCKS}
        assert max(load.kv_used_blocks for load in engine.loads[rank]) == 3
        again = await run.answer(asked(f"again-{rank}", rank=pinned))
        assert (again.cached, again.tokens) == (2 * BLOCK, first.tokens)
        assert engine.loads[rank][-1].kv_used_blocks == 0
    with pytest.raises(InvalidRequest, match="rank"):
        engine.submit(asked("nowhere", rank=len(ranks)))
    assert await engine.clear_kv() == 2 * len(ranks)
    await run.settle()
    assert [engine.replicas[rank].blocks for rank in ranks] == [set()] * len(ranks), (
        "nobody need wait for a step"
    )
    for rank in ranks:
        assert (await run.answer(asked(f"anew-{rank}", rank=rank if is_data(several) else None))).cached == 0


async def test_one_that_is_aborted_leaves_nothing(several: Kept, run: Run) -> None:
    engine = engine_of(run)
    for rank in run.info.dp_ranks:
        long = replace(
            asked(f"long-{rank}", rank=rank if is_data(several) else None),
            stop=StopConditions(max_tokens=180, ignore_eos=True),
        )
        answer = run.submit(long)
        await run.until(lambda answer=answer: bool(answer.tokens))
        run.abort(answer)
        await run.answer(asked(f"probe-{rank}", rank=rank if is_data(several) else None))
        last = engine.loads[rank][-1]
        assert (last.running, last.waiting, last.kv_used_blocks) == (0, 0, 0)
