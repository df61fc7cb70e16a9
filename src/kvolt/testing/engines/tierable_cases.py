"""The kv-tiers tier: complete blocks are told once, and stay while they are copied. For KvTierable engines."""

from __future__ import annotations

import asyncio

from kvolt.core.ids import RequestId
from kvolt.engines.contract import KvEvents, KvMovable, KvTierable, SealedKv
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import prefill_of
from kvolt.testing.engines.harness import Case, Harness, Run, engine_run
from kvolt.testing.engines.placed_cases import MOST_TO_FILL, computed, contents, copy_blocks, placed
from kvolt.testing.engines.replica import block_hashes

_NAME = RequestId("offload")


async def _pinned(run: Run) -> list[SealedKv]:
    """All that there is now."""
    engine = run.engine
    assert isinstance(engine, KvTierable)
    found: list[SealedKv] = []
    while more := await engine.pin_sealed(_NAME):
        found += more
    for each in found:
        assert len(each.blocks) == len(each.keys) == len(each.hashes) > 0
        assert each.expires_in_s > 0
        assert (each.parent is None) == (each.parent_hash is None) == (each.first == 0)
    return found


async def _let_go(run: Run) -> None:
    await prefill_of(run).release_prefill(_NAME)


async def complete_blocks_are_told_once(harness: Harness) -> None:
    """From the first call on, with the names that others know them by."""
    async with engine_run(harness) as run:
        before = blocks_request(run, "before", 1)
        await run.answer(before)
        assert await _pinned(run) == [], "nobody had asked yet"
        request = blocks_request(run, "r", blocks_that_fit(run, 3), variant=1)
        await run.answer(request)
        found = await _pinned(run)
        hashes = [each for run_of_blocks in found for each in run_of_blocks.hashes]
        wanted = block_hashes(request, run.info.block_size)
        assert hashes[: len(wanted)] == wanted, "not the blocks of the prompt, from the first on"
        if isinstance(run.engine, KvMovable):
            keys = [key for each in found for key in each.keys]
            assert tuple(keys[: len(wanted)]) == run.engine.kv_keys(request)
        await _let_go(run)
        assert await _pinned(run) == [], "told a second time"
        await run.assert_empty()


async def what_is_copied_stays(harness: Harness) -> None:
    """Though others come in need of blocks."""
    async with engine_run(harness) as run:
        await _pinned(run)
        await run.answer(blocks_request(run, "r", 2))
        found = await _pinned(run)
        blocks = [block for each in found for block in each.blocks]
        before = contents(run, blocks)
        for index in range(MOST_TO_FILL):
            await run.answer(
                blocks_request(run, f"other {index}", blocks_that_fit(run, 8), variant=index + 1)
            )
        assert contents(run, blocks) == before, "a block that is held was written to"
        await _let_go(run)
        await run.assert_empty()


async def blocks_that_come_meanwhile_are_passed_over(harness: Harness) -> None:
    """From the last on, for a request that computes its prompt: those that it took are not computed, whatever comes
    too late is let go, and the tokens are the same."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        engine = target.engine
        assert isinstance(engine, KvTierable)
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=9)
        handoff, held = await computed(source, request)
        del handoff  # whoever computes the prompt needs no ticket
        # The block that the last token ends is computed with it.
        num_usable = (request.num_prompt_tokens - 1) // source.info.block_size
        room = await placed(target).make_room(held.keys[:num_usable], held.hashes[:num_usable])
        copy_blocks(source, held, target, room)
        answer = target.submit(request)
        num_taken = num_asked = 0
        while num_asked < len(room.blocks) or not answer.tokens:
            num_asked = min(num_asked + 1, len(room.blocks))
            taken = await engine.take_kv(room, num_asked, request.request_id)
            num_taken += taken.num_taken
            await asyncio.sleep(0.001)
        late = await engine.take_kv(room, len(room.blocks), request.request_id)
        assert late.num_taken == 0, "blocks of a prompt that is computed were taken"
        await placed(target).settle_kv(room, 0)
        await target.finish(answer)
        await prefill_of(source).release_prefill(request.request_id)
        assert answer.tokens == (await source.answer(request)).tokens, (
            "other tokens for blocks that came meanwhile"
        )
        assert answer.cached == num_taken * source.info.block_size, (
            "what was taken was computed, or not counted"
        )
        if isinstance(engine, KvEvents):
            hashes = block_hashes(request, source.info.block_size)
            assert target.replica.num_leading(hashes) == len(hashes), (
                "blocks that were passed over were not told"
            )
        await source.assert_empty()
        await target.assert_empty()


CASES: tuple[Case, ...] = (
    complete_blocks_are_told_once,
    what_is_copied_stays,
    blocks_that_come_meanwhile_are_passed_over,
)
