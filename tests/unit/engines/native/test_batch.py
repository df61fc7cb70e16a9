"""Batches: one that was moved on from the last is the same as one made from the start."""

from __future__ import annotations

import random

import pytest
import torch

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.engines.native.batch import Batch, BatchBuilder
from kvolt.kv import BlockPool
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import Limits, StepPlan

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def scheduler(num_blocks: int = 60) -> Scheduler:
    limits = Limits(
        max_num_seqs=6, max_batch_tokens=16, max_waiting=50, context_length=64, block_size=BLOCK_SIZE
    )
    keys = BlockKeyContext(weights_hash="w", dtype="float32", block_size=BLOCK_SIZE, layout="l")
    return Scheduler(BlockPool(num_blocks), limits, (), lambda request: keys)


def request(name: str, length: int, max_tokens: int, lora: str | None = None) -> Request:
    tokens = tuple(random.Random(name).randrange(1000) for _ in range(length))
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tokens,
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        lora=lora,
    )


def logit_rows(plan: StepPlan) -> list[int]:
    rows = list(range(len(plan.decodes)))
    row = len(rows)
    for work in plan.prefills:
        row += work.num_tokens
        if work.samples:
            rows.append(row - 1)
    return rows


def same(one: Batch, other: Batch) -> None:
    for name in ("token_ids", "positions", "slots", "context_lens_t", "logit_rows"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("num_decodes", "query_starts", "context_lens", "lora_rows"):
        assert getattr(one, name) == getattr(other, name), name
    for row, context in enumerate(one.context_lens):  # beyond a sequence's own blocks nothing is read
        count = -(-context // BLOCK_SIZE)
        assert torch.equal(one.block_tables[row, :count], other.block_tables[row, :count])


@pytest.mark.parametrize("num_blocks", [60, 14], ids=["room for all", "preemptions"])
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_moved_on_is_one_made_anew(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    engine = scheduler(num_blocks)
    kept = BatchBuilder(BLOCK_SIZE, CPU)
    for number in range(10):
        lora = rng.choice([None, None, "a"])
        engine.add_request(request(f"{seed}/{number}", rng.randrange(1, 20), rng.randrange(1, 24), lora))
    num_moved = 0
    while (plan := engine.plan()) is not None:
        if rng.random() < 0.1:
            engine.discard(plan)  # as after a step that failed: the same tokens again
            continue
        batch = kept.build(plan, logit_rows(plan))
        same(batch, BatchBuilder(BLOCK_SIZE, CPU).build(plan, logit_rows(plan)))
        num_moved += not plan.prefills
        check(plan, batch)
        engine.commit(plan, [rng.randrange(1000) for _ in logit_rows(plan)])
    assert num_moved > 8


def check(plan: StepPlan, batch: Batch) -> None:
    """Against the sequences themselves."""
    for number, work in enumerate([*plan.decodes, *plan.prefills]):
        rows = range(batch.query_starts[number], batch.query_starts[number + 1])
        assert len(rows) == work.num_tokens
        for offset, row in enumerate(rows):
            position = work.start + offset
            assert batch.token_ids[row] == work.sequence.tokens[position]
            assert batch.positions[row] == position
            block = work.sequence.blocks[position // BLOCK_SIZE]
            assert batch.slots[row] == block * BLOCK_SIZE + position % BLOCK_SIZE
