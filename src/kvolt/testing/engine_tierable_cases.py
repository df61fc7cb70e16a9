"""The kv-tiers tier: complete blocks are told once, and stay while they are copied. For KvTierable engines."""

from __future__ import annotations

from kvolt.core.ids import RequestId
from kvolt.engines.contract import KvMovable, KvTierable, SealedKv
from kvolt.testing.engine_event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engine_handoff_cases import prefill_of
from kvolt.testing.engine_harness import Case, Harness, Run, engine_run
from kvolt.testing.engine_placed_cases import MOST_TO_FILL, contents
from kvolt.testing.engine_replica import block_hashes

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


CASES: tuple[Case, ...] = (complete_blocks_are_told_once, what_is_copied_stays)
