"""Tier `kv-tiers`, for KvTierable engines: complete blocks are pinned once and stay while they are copied."""

from __future__ import annotations

import asyncio

from kvolt.core.ids import RequestId
from kvolt.engines.contract import KvEvents, KvMovable, KvTierable, SealedKv
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.block_copies import computed, contents, copy_blocks, placed, prefill_of
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.harness import Case, Harness, Run, block_hashes, engine_run
from kvolt.testing.engines.placed_cases import MOST_TO_FILL

_NAME = RequestId("offload")


async def _pinned(run: Run) -> list[SealedKv]:
    """Pin all blocks that are complete now."""
    engine = run.engine
    assert isinstance(engine, KvTierable)
    pinned: list[SealedKv] = []
    while more := await engine.pin_sealed(_NAME):
        pinned += more
    for each in pinned:
        assert len(each.blocks) == len(each.keys) == len(each.hashes) > 0
        assert each.expires_in_s > 0
        assert (each.parent is None) == (each.parent_hash is None) == (each.first == 0)
    return pinned


async def _release(run: Run) -> None:
    await prefill_of(run).release_prefill(_NAME)


async def complete_blocks_are_pinned_once(harness: Harness) -> None:
    """Blocks completed after the first call are pinned with their keys and hashes."""
    async with engine_run(harness) as run:
        before = blocks_request(run, "before", 1)
        await run.answer(before)
        assert await _pinned(run) == [], "blocks before the first call were pinned"
        request = blocks_request(run, "r", blocks_that_fit(run, 3), variant=1)
        await run.answer(request)
        pinned = await _pinned(run)
        hashes = [each for run_of_blocks in pinned for each in run_of_blocks.hashes]
        expected = block_hashes(request, run.info.block_size)
        assert hashes[: len(expected)] == expected, "the pinned blocks are not those of the prompt"
        if isinstance(run.engine, KvMovable):
            keys = [key for each in pinned for key in each.keys]
            assert tuple(keys[: len(expected)]) == run.engine.kv_keys(request)
        await _release(run)
        assert await _pinned(run) == [], "blocks were pinned twice"
        await run.assert_empty()


async def pinned_blocks_stay(harness: Harness) -> None:
    """Pinned blocks do not change while other requests need blocks."""
    async with engine_run(harness) as run:
        await _pinned(run)
        await run.answer(blocks_request(run, "r", 2))
        pinned = await _pinned(run)
        blocks = [block for each in pinned for block in each.blocks]
        before = contents(run, blocks)
        for index in range(MOST_TO_FILL):
            await run.answer(
                blocks_request(run, f"other {index}", blocks_that_fit(run, 8), variant=index + 1)
            )
        assert contents(run, blocks) == before, "a pinned block was overwritten"
        await _release(run)
        await run.assert_empty()


async def attached_blocks_are_skipped(harness: Harness) -> None:
    """Blocks attached to a request during its prefill are not computed, late ones are freed, tokens do not change."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        engine = target.engine
        assert isinstance(engine, KvTierable)
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=9)
        handoff, held = await computed(source, request)
        del handoff  # not needed: the target computes the prompt itself
        # The block that ends with the last token is always computed.
        num_usable = (request.num_prompt_tokens - 1) // source.info.block_size
        allocation = await placed(target).allocate_kv(held.keys[:num_usable], held.hashes[:num_usable])
        copy_blocks(source, held, target, allocation)
        answer = target.submit(request)
        num_attached = num_ready = 0
        while num_ready < len(allocation.blocks) or not answer.tokens:
            num_ready = min(num_ready + 1, len(allocation.blocks))
            result = await engine.attach_kv(allocation, num_ready, request.request_id)
            num_attached += result.num_attached
            await asyncio.sleep(0.001)
        late = await engine.attach_kv(allocation, len(allocation.blocks), request.request_id)
        assert late.num_attached == 0, "blocks were attached after the prefill"
        await placed(target).commit_kv(allocation, 0)
        await target.finish(answer)
        await prefill_of(source).release_prefill(request.request_id)
        assert answer.tokens == (await source.answer(request)).tokens, "attached blocks gave wrong tokens"
        assert answer.cached == num_attached * source.info.block_size, (
            "attached blocks were computed or not counted as cached"
        )
        if isinstance(engine, KvEvents):
            hashes = block_hashes(request, source.info.block_size)
            assert target.replica.num_leading(hashes) == len(hashes), "attached blocks were not published"
        await source.assert_empty()
        await target.assert_empty()


CASES: tuple[Case, ...] = cases_in(__name__)
