"""Tier `kv-placed`, for KvAddressable engines: blocks are copied from one engine's memory into another's."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from kvolt.core.block_key import BLOCK_KEY_BYTES
from kvolt.core.errors import NotFound
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.request import Request
from kvolt.engines.contract import KvAllocation, KvEvents, KvMovable
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.block_copies import (
    computed,
    contents,
    copy_blocks,
    move,
    placed,
    prefill_of,
    slabs_of,
)
from kvolt.testing.engines.event_cases import answer_matching_events, blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import short_expiry, whole_answer
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, block_hashes, engine_run, renamed

MOST_TO_FILL = 24
"""Maximum number of prompts or allocations to fill a pool."""


async def released(run: Run, request: Request) -> None:
    await prefill_of(run).release_prefill(request.request_id)
    await run.assert_empty()


async def keys_identify_contents(harness: Harness) -> None:
    async with engine_run(harness) as one, engine_run(harness) as other:
        if not isinstance(one.engine, KvMovable) or not isinstance(other.engine, KvMovable):
            raise NotRun("the engine does not derive keys of requests")
        request = blocks_request(one, "r", blocks_that_fit(one, 3))
        keys = one.engine.kv_keys(request)
        assert len(keys) == len(set(keys)) == len(request.token_ids) // one.info.block_size
        assert other.engine.kv_keys(request) == keys, "two engines have different keys for one block"
        assert other.engine.kv_layout() == one.engine.kv_layout()
        assert one.engine.kv_layout().block_size == one.info.block_size
        ids = request.token_ids
        for changed in (replace(request, salt="other"), replace(request, token_ids=ids[1:] + ids[:1])):
            assert not set(keys).intersection(one.engine.kv_keys(changed)), "one key for two blocks"


async def copied_blocks_are_used(harness: Harness) -> None:
    """The same tokens as on one engine, without computing the copied blocks again."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        block_size, num_blocks = whole.info.block_size, blocks_that_fit(whole, 3)
        for index, length in enumerate((block_size - 1 or 1, block_size + 1, num_blocks * block_size + 1)):
            request = whole.request(f"r{index}", prompt=length, tokens=12, seed=index, variant=index % 2)
            expected = await whole.answer(request)
            answer = await target.answer(await move(source, target, request))
            assert whole_answer(answer) == expected.tokens, "copied blocks gave wrong tokens"
            assert answer.cached == length // block_size * block_size, "copied blocks were not found"
            if isinstance(target.engine, KvEvents):
                hashes = block_hashes(request, block_size)
                assert target.replica.num_leading(hashes) == len(hashes), "imported blocks were not published"
        await source.assert_empty()
        await target.assert_empty()


async def only_missing_blocks_are_allocated(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as some, engine_run(harness) as all_of_it:
        request = blocks_request(source, "r", _several_blocks(source), tokens=5)
        await move(source, all_of_it, request)
        start = request.token_ids[: source.info.block_size + 1]
        await some.answer(renamed(request, "start", token_ids=start))
        _, held = await computed(source, request)
        allocation = await placed(some).allocate_kv(held.keys, held.hashes)
        assert (allocation.num_present, len(allocation.blocks)) == (1, len(held.keys) - 1), (
            "the first block was present"
        )
        await placed(some).commit_kv(allocation, 0)
        await some.assert_empty()
        allocation = await placed(all_of_it).allocate_kv(held.keys, held.hashes)
        assert (allocation.num_present, allocation.blocks) == (len(held.keys), ()), "all blocks were present"
        await all_of_it.assert_empty()
        await released(source, request)


async def missing_blocks_are_computed(harness: Harness) -> None:
    """A partly filled allocation: no wrong tokens, and unfilled blocks are freed."""
    async with engine_run(harness) as whole, engine_run(harness) as source:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 3), tokens=9)
        expected = await whole.answer(request)
        handoff, held = await computed(source, request)
        for num_filled in range(len(held.keys)):
            async with engine_run(harness) as target:
                allocation = await placed(target).allocate_kv(held.keys, held.hashes)
                copy_blocks(source, held, target, KvAllocation(0, allocation.blocks[:num_filled]))
                await placed(target).commit_kv(allocation, num_filled)
                answer = await target.answer(replace(request, handoff=handoff))
                assert whole_answer(answer) == expected.tokens, "an unfilled block was read"
                assert answer.cached == num_filled * whole.info.block_size
                await target.assert_empty()
        await released(source, request)


async def allocation_is_exclusive(harness: Harness) -> None:
    """Running requests and the import do not affect each other."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 3), tokens=9)
        expected = await whole.answer(request)
        others = [
            blocks_request(whole, f"other{index}", 1, tokens=20, seed=index, variant=1) for index in range(3)
        ]
        expected_of_others = [(await whole.answer(other)).tokens for other in others]
        handoff, held = await computed(source, request)
        running = [target.submit(other) for other in others]
        await target.advance(2)
        allocation = await placed(target).allocate_kv(held.keys, held.hashes)
        copy_blocks(source, held, target, allocation)
        await target.finish(*running)
        assert [each.tokens for each in running] == expected_of_others, (
            "an allocation took blocks of running requests"
        )
        assert contents(target, allocation.blocks) == contents(source, held.blocks), (
            "allocated blocks were overwritten"
        )
        await placed(target).commit_kv(allocation, len(allocation.blocks))
        answer = await target.answer(replace(request, handoff=handoff))
        assert whole_answer(answer) == expected.tokens
        await target.assert_empty()
        await released(source, request)


async def allocations_never_overlap(harness: Harness) -> None:
    """Allocations shrink when the pool is full."""
    async with engine_run(harness) as run:
        total, num_blocks, num_allocations = to_fill(run)
        if num_allocations > MOST_TO_FILL:
            raise NotRun(f"a pool of {total} blocks is too large to be filled by a test")
        allocations = [
            await placed(run).allocate_kv(*unknown_blocks(index, num_blocks))
            for index in range(num_allocations)
        ]
        blocks = [block for allocation in allocations for block in allocation.blocks]
        assert blocks, "an idle engine allocates no blocks"
        assert len(blocks) == len(set(blocks)), "a block was allocated twice"
        for slab in slabs_of(run):
            slab.numbers(blocks)
        for allocation in allocations:
            assert allocation.num_present == 0
            if allocation.blocks:
                await placed(run).commit_kv(allocation, 0)
        await run.assert_empty()


async def same_blocks_are_imported_twice(harness: Harness) -> None:
    """Two concurrent imports of the same blocks: they are cached once, the duplicates are freed."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 3), tokens=9)
        expected = await whole.answer(request)
        handoff, held = await computed(source, request)
        allocations = [await placed(target).allocate_kv(held.keys, held.hashes) for _ in range(2)]
        for allocation in allocations:
            copy_blocks(source, held, target, allocation)
        for allocation in allocations[::-1]:
            if allocation.blocks:
                await placed(target).commit_kv(allocation, len(allocation.blocks))
        answer = await target.answer(replace(request, handoff=handoff))
        assert whole_answer(answer) == expected.tokens
        assert answer.cached == len(held.keys) * whole.info.block_size
        await target.assert_empty()
        await released(source, request)


async def clear_during_import(harness: Harness) -> None:
    """The parents of the imported blocks are cleared: events and cache must stay consistent."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        if not isinstance(target.engine, KvEvents):
            raise NotRun("its blocks cannot be cleared")
        request = blocks_request(source, "r", _several_blocks(source), tokens=9)
        _, held = await computed(source, request)
        start = request.token_ids[: source.info.block_size + 1]
        await target.answer(renamed(request, "start", token_ids=start))
        allocation = await placed(target).allocate_kv(held.keys, held.hashes)
        copy_blocks(source, held, target, allocation)
        await target.engine.clear_kv()
        await target.until(lambda: bool(target.replica.num_cleared))
        await placed(target).commit_kv(allocation, len(allocation.blocks))
        answer = await answer_matching_events(target, request)
        await prefill_of(source).release_prefill(request.request_id)
        assert answer.tokens == (await source.answer(request)).tokens
        await source.assert_empty()
        await target.assert_empty()


async def held_blocks_stay(harness: Harness) -> None:
    """Held blocks do not change until they are released."""
    async with engine_run(harness) as source:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=5)
        _, held = await computed(source, request)
        before = contents(source, held.blocks)
        _, num_blocks, num_others = to_fill(source)
        for index in range(min(num_others, MOST_TO_FILL, num_blocks * source.info.block_size)):
            await source.answer(
                blocks_request(source, f"other{index}", num_blocks, tokens=2, variant=1 + index)
            )
        assert contents(source, held.blocks) == before, "a held block has changed"
        assert await placed(source).held_kv(request.request_id) == held
        await prefill_of(source).release_prefill(request.request_id)
        await _assert_not_held(source, request)
        await source.assert_empty()


async def expired_blocks_are_not_held(harness: Harness) -> None:
    async with engine_run(harness) as source:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=5)
        handoff, _ = await computed(source, request)
        await asyncio.sleep(short_expiry(handoff) + 0.2)
        await _assert_not_held(source, request)
        await source.assert_empty()


async def _assert_not_held(run: Run, request: Request) -> None:
    for request_id in (request.request_id, RequestId("unknown")):
        try:
            await placed(run).held_kv(request_id)
        except NotFound:
            continue
        raise AssertionError(f"the blocks of {request_id} are still held")


def _several_blocks(run: Run) -> int:
    num_blocks = blocks_that_fit(run, 3)
    if num_blocks < 2:
        raise NotRun("a prompt of two blocks does not fit")
    return num_blocks


def to_fill(run: Run) -> tuple[int, int, int]:
    """Blocks of the pool, full blocks of a prompt, and number of such prompts that overflow the pool."""
    total = run.info.capacity.kv_total_blocks
    num_blocks = blocks_that_fit(run, max(total // 4, 1))
    return total, num_blocks, total // num_blocks + 1


def unknown_blocks(index: int, num_blocks: int) -> tuple[list[BlockKey], list[SequenceHash]]:
    """Keys and hashes of blocks that no engine has."""
    numbers = range(1 + index * num_blocks, 1 + (index + 1) * num_blocks)
    keys = [BlockKey(number.to_bytes(BLOCK_KEY_BYTES, "little")) for number in numbers]
    return keys, [SequenceHash(number) for number in numbers]


CASES: tuple[Case, ...] = cases_in(__name__)
