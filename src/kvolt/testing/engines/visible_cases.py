"""Tier `kv-visible`, for KvEvents and KvVisible engines: reported contents match the published events."""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.engines.contract import KvVisible
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.event_cases import (
    answer_matching_events,
    blocks_request,
    blocks_that_fit,
    kv_events,
)
from kvolt.testing.engines.harness import Case, Harness, Replica, Run, engine_run, renamed


def kv_visible(run: Run) -> KvVisible:
    engine = run.engine
    assert isinstance(engine, KvVisible)
    return engine


async def assert_contents_match_events(run: Run) -> None:
    """Check that the contents equal the published events. The replay fails if a child precedes its parent."""
    contents = Replica(await kv_visible(run).kv_contents())
    missing, unpublished = run.replica.blocks - contents.blocks, contents.blocks - run.replica.blocks
    assert not missing, f"{len(missing)} blocks were published but are not held"
    assert not unpublished, f"{len(unpublished)} blocks are held but were not published"


async def match_counts_held_blocks(harness: Harness) -> None:
    async with engine_run(harness) as run:
        visible = kv_visible(run)
        num_blocks, block_size = blocks_that_fit(run, 3), run.info.block_size
        request = blocks_request(run, "r", num_blocks)
        ids = request.token_ids
        assert await visible.match(request) == 0
        await run.answer(request)
        for length in (1, block_size, block_size + 1, len(ids)):
            part = replace(request, token_ids=ids[:length])
            assert await visible.match(part) == length // block_size * block_size
        assert await visible.match(replace(request, token_ids=ids[1:] + ids[:1])) == 0
        assert await visible.match(replace(request, salt="other")) == 0
        await kv_events(run).clear_kv()
        assert await visible.match(request) == 0


async def contents_match_events(harness: Harness) -> None:
    """After answers, aborts, several choices, a clear, and more answers."""
    async with engine_run(harness) as run:
        num_blocks = blocks_that_fit(run, 4)
        await assert_contents_match_events(run)
        for turn in range(2):
            answers = [
                run.submit(
                    blocks_request(
                        run,
                        f"r{turn}-{index}",
                        1 + index % num_blocks,
                        tokens=20,
                        choices=1 + index % 2,
                        variant=index % 3,
                    )
                )
                for index in range(12)
            ]
            await run.advance(2)
            for answer in answers[::3]:
                if not answer.done:
                    run.abort(answer)
            await run.finish(*(answer for answer in answers if not answer.stopped))
            await run.assert_empty()
            await assert_contents_match_events(run)
            if not turn:
                await kv_events(run).clear_kv()
                await run.until(lambda: run.replica.num_cleared == 1)
                await assert_contents_match_events(run)
        assert run.replica.blocks


async def reads_change_nothing(harness: Harness) -> None:
    async with engine_run(harness) as run:
        visible = kv_visible(run)
        request = blocks_request(run, "r", blocks_that_fit(run, 2))
        await run.answer(request)
        before = await visible.kv_contents()
        for _ in range(3):
            await visible.match(request)
            assert await visible.kv_contents() == before
        await answer_matching_events(run, renamed(request, "again"))
        await run.assert_empty()


CASES: tuple[Case, ...] = cases_in(__name__)
