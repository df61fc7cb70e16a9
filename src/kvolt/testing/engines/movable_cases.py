"""The kv-movable tier: blocks that left one engine are as good in another, or are a miss. For KvMovable engines."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.kv_block import KvBlock
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents, KvMovable
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, engine_run
from kvolt.testing.engines.replica import block_hashes


def kv_movable(run: Run) -> KvMovable:
    engine = run.engine
    assert isinstance(engine, KvMovable)
    return engine


async def export_of(run: Run, request: Request) -> tuple[KvBlock, ...]:
    """All full blocks of a request that was answered here."""
    blocks = await kv_movable(run).export_kv(kv_movable(run).kv_keys(request))
    assert len(blocks) == len(request.token_ids) // run.info.block_size, (
        "blocks of an answered prompt are missing"
    )
    return blocks


async def assert_answer(run: Run, request: Request, tokens: Sequence[int], num_blocks: int) -> None:
    """The right tokens, from so many cached blocks."""
    answer = await run.answer(request)
    assert answer.tokens[0] == list(tokens), "other tokens after blocks came in"
    assert answer.cached == num_blocks * run.info.block_size, f"{answer.cached} tokens were found"


async def keys_name_what_the_bytes_depend_on(harness: Harness) -> None:
    async with engine_run(harness) as one, engine_run(harness) as other:
        request = blocks_request(one, "r", blocks_that_fit(one, 3))
        keys = kv_movable(one).kv_keys(request)
        assert len(keys) == len(set(keys)) == len(request.token_ids) // one.info.block_size
        assert kv_movable(other).kv_keys(request) == keys, "two engines name the same block differently"
        assert kv_movable(other).kv_layout() == kv_movable(one).kv_layout()
        assert kv_movable(one).kv_layout().block_size == one.info.block_size
        ids = request.token_ids
        for changed in (replace(request, salt="other"), replace(request, token_ids=ids[1:] + ids[:1])):
            assert not set(keys).intersection(kv_movable(one).kv_keys(changed)), "one name for two blocks"


async def exports_are_sealed_and_in_order(harness: Harness) -> None:
    async with engine_run(harness) as run:
        movable = kv_movable(run)
        request = blocks_request(run, "r", blocks_that_fit(run, 3))
        keys = movable.kv_keys(request)
        assert await movable.export_kv(keys) == (), "nothing was computed yet"
        await run.answer(request)
        blocks = await export_of(run, request)
        assert tuple(block.key for block in blocks) == keys
        assert [block.sequence_hash for block in blocks] == block_hashes(request, run.info.block_size)
        assert [block.position for block in blocks] == list(range(len(blocks)))
        assert [block.parent for block in blocks] == [None, *keys[:-1]]
        assert all(block.intact for block in blocks)
        assert {len(block.data) for block in blocks} == {movable.kv_layout().block_bytes}
        stranger = BlockKey(bytes(len(keys[0])))
        assert await movable.export_kv((*keys[:1], stranger, *keys[1:])) == blocks[:1]
        await run.assert_empty()


async def blocks_travel(harness: Harness) -> None:
    """What came in is found, told, and gives the same tokens; twice is once."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=10)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        for _ in range(2):
            assert await kv_movable(target).import_kv(blocks) == len(blocks)
        await assert_answer(target, request, tokens, len(blocks))
        if isinstance(target.engine, KvEvents):
            told = target.replica.num_leading([block.sequence_hash for block in blocks])
            assert told == len(blocks), "blocks that came in were not told"
        again = replace(request, request_id=RequestId("again"))
        assert (await export_of(target, request)) == blocks, "the bytes changed on their way"
        await assert_answer(source, again, tokens, len(blocks))
        await target.assert_empty()


async def half_of_a_prompt_travels(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        if blocks_that_fit(source, 3) < 2:
            raise NotRun("a prompt of two blocks does not fit")
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=10)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        assert await kv_movable(target).import_kv(blocks[1:]) == 0, "taken without its parent"
        assert await kv_movable(target).import_kv(blocks[:1]) == 1
        await assert_answer(target, request, tokens, 1)
        await target.assert_empty()


async def a_damaged_block_is_a_miss(harness: Harness) -> None:
    """A flipped bit, another block's bytes, too few bytes: never wrong tokens, and what was before it stays."""
    async with engine_run(harness) as source:
        num_blocks = blocks_that_fit(source, 3)
        request = blocks_request(source, "r", num_blocks, tokens=10)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        last = blocks[-1]
        turned = blocks_request(source, "turned", num_blocks, variant=1)
        await source.answer(turned)
        others = await export_of(source, turned)
        for damaged in (
            replace(last, data=bytes([last.data[0] ^ 1]) + last.data[1:]),
            replace(last, data=last.data[:-1] + bytes([last.data[-1] ^ 128])),
            replace(last, data=others[-1].data),
            replace(others[-1], key=last.key, parent=last.parent),
            replace(last, data=last.data[:-1]).seal(),
            replace(last, checksum=last.checksum ^ 1),
        ):
            async with engine_run(harness) as target:
                taken = await kv_movable(target).import_kv((*blocks[:-1], damaged))
                assert taken == num_blocks - 1, "a damaged block was taken, or a good one was not"
                await assert_answer(target, request, tokens, num_blocks - 1)
                await target.assert_empty()


async def import_while_it_computes(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=20)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        others = [
            target.submit(blocks_request(target, f"other{i}", 1, tokens=20, seed=i, variant=1))
            for i in range(3)
        ]
        same = target.submit(replace(request, request_id=RequestId("same")))
        await target.advance(2)
        assert await kv_movable(target).import_kv(blocks) == len(blocks)
        await target.finish(same, *others)
        assert same.tokens[0] == tokens
        await assert_answer(target, request, tokens, len(blocks))
        await target.assert_empty()


CASES: tuple[Case, ...] = (
    keys_name_what_the_bytes_depend_on,
    exports_are_sealed_and_in_order,
    blocks_travel,
    half_of_a_prompt_travels,
    a_damaged_block_is_a_miss,
    import_while_it_computes,
)
