"""Cases of tier `kv-placed` about imported blocks that are kept until their request is admitted."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.block_copies import move, placed, prefill_of
from kvolt.testing.engines.event_cases import answer_matching_events, blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import short_expiry, whole_answer
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, engine_run, renamed
from kvolt.testing.engines.placed_cases import MOST_TO_FILL, to_fill, unknown_blocks


async def kept_blocks_stay_for_their_request(harness: Harness) -> None:
    """Other requests before the submit evict none of the kept blocks."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = _request(whole)
        expected = await whole.answer(request)
        moved = await move(source, target, request, keep=True)
        await _fill(target)
        num_kept = len(request.token_ids) // target.info.block_size
        assert target.load.kv_used_blocks >= num_kept, "kept blocks are not counted as used"
        answer = await target.answer(moved)
        assert answer.cached == num_kept * target.info.block_size, "kept blocks were evicted"
        assert whole_answer(answer) == expected.tokens
        await target.assert_empty()


async def cached_prefix_is_kept_too(harness: Harness) -> None:
    """A prefix that is cached and need not be imported is kept as well."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = _request(source)
        start = request.token_ids[: source.info.block_size + 1]
        await target.answer(renamed(request, "start", token_ids=start))
        moved = await move(source, target, request, keep=True)
        await _fill(target)
        answer = await target.answer(moved)
        assert answer.cached == len(request.token_ids) // target.info.block_size * target.info.block_size
        await target.assert_empty()


async def release_prefill_releases_kept_blocks(harness: Harness) -> None:
    """Released blocks stay cached."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        moved = await move(source, target, _request(source), keep=True)
        await prefill_of(target).release_prefill(moved.request_id)
        await target.assert_empty()
        answer = await target.answer(moved)
        assert answer.cached, "released blocks were dropped"
        await target.assert_empty()


async def kept_blocks_expire(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        moved = await move(source, target, _request(source), keep=True)
        assert moved.handoff is not None
        await asyncio.sleep(short_expiry(moved.handoff) + 0.2)
        await target.assert_empty()


async def abort_releases_kept_blocks(harness: Harness) -> None:
    """Abort before and just after the request starts."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        answer = target.submit(await move(source, target, _request(source), keep=True))
        target.abort(answer)
        await target.assert_empty()
        later = replace(_request(source), request_id=RequestId("later"))
        answer = target.submit(await move(source, target, later, keep=True))
        await target.advance(1)
        target.abort(answer)
        await target.assert_empty()


async def kept_blocks_yield_to_running_requests(harness: Harness) -> None:
    """A pool full of kept blocks does not block running requests."""
    async with engine_run(harness) as run:
        total, num_blocks, num_allocations = to_fill(run)
        if num_allocations > MOST_TO_FILL:
            raise NotRun(f"a pool of {total} blocks is too large to be filled by a test")
        for index in range(num_allocations):
            allocation = await placed(run).allocate_kv(*unknown_blocks(index, num_blocks))
            if allocation.blocks:
                await placed(run).commit_kv(allocation, len(allocation.blocks), RequestId(f"kept{index}"))
        await run.finish(*(run.submit(blocks_request(run, f"r{index}", 1, tokens=5)) for index in range(3)))
        for index in range(num_allocations):
            await prefill_of(run).release_prefill(RequestId(f"kept{index}"))
        await run.assert_empty()


async def clear_removes_kept_blocks(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        if not isinstance(target.engine, KvEvents):
            raise NotRun("its blocks cannot be cleared")
        moved = await move(source, target, _request(source), keep=True)
        await target.engine.clear_kv()
        await target.until(lambda: bool(target.replica.num_cleared))
        await target.assert_empty()
        await answer_matching_events(target, moved)
        await target.assert_empty()


def _request(run: Run) -> Request:
    """Build a request with a prefix of its own."""
    return blocks_request(run, "r", blocks_that_fit(run, 3), tokens=9, variant=1)


async def _fill(run: Run) -> None:
    """Run other prompts until all earlier cached blocks are evicted."""
    _, num_blocks, num_others = to_fill(run)
    for index in range(min(num_others, MOST_TO_FILL, num_blocks * run.info.block_size - 1)):
        await run.answer(blocks_request(run, f"other{index}", num_blocks, tokens=2, variant=2 + index))


CASES: tuple[Case, ...] = cases_in(__name__)
