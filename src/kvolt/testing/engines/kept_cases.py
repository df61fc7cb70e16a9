"""The cases of the kv-placed tier about blocks that came for a request, and stay until it is admitted."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents
from kvolt.testing.engines.event_cases import ask_as_told, blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import prefill_of, short_expiry, whole_answer
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, engine_run
from kvolt.testing.engines.placed_cases import MOST_TO_FILL, move, placed, strangers, to_fill


async def what_came_stays_for_its_request(harness: Harness) -> None:
    """However much else is computed before it is submitted: it finds all of it, and has its tokens."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = _request(whole)
        expected = await whole.answer(request)
        moved = await move(source, target, request, keep=True)
        await _fill(target)
        num_kept = len(request.token_ids) // target.info.block_size
        assert target.load.kv_used_blocks >= num_kept, "what is kept for a request is not counted as used"
        answer = await target.answer(moved)
        assert answer.cached == num_kept * target.info.block_size, "what came for a request had gone"
        assert whole_answer(answer) == expected.tokens
        await target.assert_empty()


async def what_was_here_stays_with_what_came(harness: Harness) -> None:
    """The start of a prompt that need not come is kept as well."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = _request(source)
        start = request.token_ids[: source.info.block_size + 1]
        await target.answer(replace(request, request_id=RequestId("start"), token_ids=start))
        moved = await move(source, target, request, keep=True)
        await _fill(target)
        answer = await target.answer(moved)
        assert answer.cached == len(request.token_ids) // target.info.block_size * target.info.block_size
        await target.assert_empty()


async def what_nobody_comes_for_is_let_go(harness: Harness) -> None:
    """Once that is said; it is then cached as anything is."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        moved = await move(source, target, _request(source), keep=True)
        await prefill_of(target).release_prefill(moved.request_id)
        await target.assert_empty()
        answer = await target.answer(moved)
        assert answer.cached, "what was let go was thrown away"
        await target.assert_empty()


async def what_nobody_came_for_expires(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        moved = await move(source, target, _request(source), keep=True)
        assert moved.handoff is not None
        await asyncio.sleep(short_expiry(moved.handoff) + 0.2)
        await target.assert_empty()


async def an_abort_lets_go_of_what_came(harness: Harness) -> None:
    """Of a request that has not begun, or just has."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        answer = target.submit(await move(source, target, _request(source), keep=True))
        target.abort(answer)
        await target.assert_empty()
        later = replace(_request(source), request_id=RequestId("later"))
        answer = target.submit(await move(source, target, later, keep=True))
        await target.advance(1)
        target.abort(answer)
        await target.assert_empty()


async def what_came_yields_to_who_computes(harness: Harness) -> None:
    """A pool that is full of what is kept for those who may come is none for those who are here."""
    async with engine_run(harness) as run:
        total, num_blocks, num_rooms = to_fill(run)
        if num_rooms > MOST_TO_FILL:
            raise NotRun(f"a pool of {total} blocks is too large to be filled by a test")
        for index in range(num_rooms):
            room = await placed(run).make_room(*strangers(index, num_blocks))
            if room.blocks:
                await placed(run).settle_kv(room, len(room.blocks), RequestId(f"stranger{index}"))
        await run.finish(*(run.submit(blocks_request(run, f"r{index}", 1, tokens=5)) for index in range(3)))
        for index in range(num_rooms):
            await prefill_of(run).release_prefill(RequestId(f"stranger{index}"))
        await run.assert_empty()


async def a_clear_forgets_what_came(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        if not isinstance(target.engine, KvEvents):
            raise NotRun("its blocks cannot be cleared")
        moved = await move(source, target, _request(source), keep=True)
        await target.engine.clear_kv()
        await target.until(lambda: bool(target.replica.num_cleared))
        await target.assert_empty()
        await ask_as_told(target, moved)
        await target.assert_empty()


def _request(run: Run) -> Request:
    """One that begins as no other of these cases does."""
    return blocks_request(run, "r", blocks_that_fit(run, 3), tokens=9, variant=1)


async def _fill(run: Run) -> None:
    """With other prompts, one after the other, until nothing is left that is merely cached from before."""
    _, num_blocks, num_others = to_fill(run)
    for index in range(min(num_others, MOST_TO_FILL, num_blocks * run.info.block_size - 1)):
        await run.answer(blocks_request(run, f"other{index}", num_blocks, tokens=2, variant=2 + index))


CASES: tuple[Case, ...] = (
    what_came_stays_for_its_request,
    what_was_here_stays_with_what_came,
    what_nobody_comes_for_is_let_go,
    what_nobody_came_for_expires,
    an_abort_lets_go_of_what_came,
    what_came_yields_to_who_computes,
    a_clear_forgets_what_came,
)
