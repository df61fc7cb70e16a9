"""Tier `kv-movable`, for KvMovable engines: an exported block is valid in another engine or a cache miss."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvolt.core.block_key import KvBlock
from kvolt.core.ids import BlockKey
from kvolt.core.request import Request
from kvolt.engines.contract import KvEvents, KvMovable
from kvolt.testing.cases import cases_in
from kvolt.testing.engines.event_cases import blocks_request, blocks_that_fit
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, block_hashes, engine_run, renamed


def kv_movable(run: Run) -> KvMovable:
    engine = run.engine
    assert isinstance(engine, KvMovable)
    return engine


async def export_of(run: Run, request: Request) -> tuple[KvBlock, ...]:
    """Export all full blocks of an answered request."""
    blocks = await kv_movable(run).export_kv(kv_movable(run).kv_keys(request))
    assert len(blocks) == len(request.token_ids) // run.info.block_size, (
        "blocks of an answered prompt are missing"
    )
    return blocks


async def assert_answer(run: Run, request: Request, tokens: Sequence[int], num_blocks: int) -> None:
    """Check the tokens and the number of cached blocks."""
    answer = await run.answer(request)
    assert answer.tokens[0] == list(tokens), "imported blocks gave wrong tokens"
    assert answer.cached == num_blocks * run.info.block_size, f"{answer.cached} tokens were cached"


async def keys_identify_contents(harness: Harness) -> None:
    async with engine_run(harness) as one, engine_run(harness) as other:
        request = blocks_request(one, "r", blocks_that_fit(one, 3))
        keys = kv_movable(one).kv_keys(request)
        assert len(keys) == len(set(keys)) == len(request.token_ids) // one.info.block_size
        assert kv_movable(other).kv_keys(request) == keys, "two engines have different keys for one block"
        assert kv_movable(other).kv_layout() == kv_movable(one).kv_layout()
        assert kv_movable(one).kv_layout().block_size == one.info.block_size
        ids = request.token_ids
        for changed in (replace(request, salt="other"), replace(request, token_ids=ids[1:] + ids[:1])):
            assert not set(keys).intersection(kv_movable(one).kv_keys(changed)), "one key for two blocks"


async def exports_are_sealed_and_in_order(harness: Harness) -> None:
    async with engine_run(harness) as run:
        movable = kv_movable(run)
        request = blocks_request(run, "r", blocks_that_fit(run, 3))
        keys = movable.kv_keys(request)
        assert await movable.export_kv(keys) == (), "blocks exist before any request"
        await run.answer(request)
        blocks = await export_of(run, request)
        assert tuple(block.key for block in blocks) == keys
        assert [block.sequence_hash for block in blocks] == block_hashes(request, run.info.block_size)
        assert [block.position for block in blocks] == list(range(len(blocks)))
        assert [block.parent for block in blocks] == [None, *keys[:-1]]
        assert all(block.is_intact for block in blocks)
        assert {len(block.data) for block in blocks} == {movable.kv_layout().block_bytes}
        unknown = BlockKey(bytes(len(keys[0])))
        assert await movable.export_kv((*keys[:1], unknown, *keys[1:])) == blocks[:1]
        await run.assert_empty()


async def blocks_move_between_engines(harness: Harness) -> None:
    """Imported blocks are published and give the same tokens; a second import has no effect."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=10)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        for _ in range(2):
            assert await kv_movable(target).import_kv(blocks) == len(blocks)
        await assert_answer(target, request, tokens, len(blocks))
        if isinstance(target.engine, KvEvents):
            num_published = target.replica.num_leading([block.sequence_hash for block in blocks])
            assert num_published == len(blocks), "imported blocks were not published"
        again = renamed(request, "again")
        assert (await export_of(target, request)) == blocks, "the bytes changed"
        await assert_answer(source, again, tokens, len(blocks))
        await target.assert_empty()


async def partial_prefix_moves(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        if blocks_that_fit(source, 3) < 2:
            raise NotRun("a prompt of two blocks does not fit")
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=10)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        assert await kv_movable(target).import_kv(blocks[1:]) == 0, "a block was accepted without its parent"
        assert await kv_movable(target).import_kv(blocks[:1]) == 1
        await assert_answer(target, request, tokens, 1)
        await target.assert_empty()


async def corrupt_block_is_a_miss(harness: Harness) -> None:
    """A flipped bit, another block's bytes, missing bytes: no wrong tokens, and earlier blocks stay."""
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
                num_imported = await kv_movable(target).import_kv((*blocks[:-1], damaged))
                assert num_imported == num_blocks - 1, "a corrupt block was accepted or a valid one rejected"
                await assert_answer(target, request, tokens, num_blocks - 1)
                await target.assert_empty()


async def import_while_computing(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=20)
        tokens = (await source.answer(request)).tokens[0]
        blocks = await export_of(source, request)
        others = [
            target.submit(blocks_request(target, f"other{i}", 1, tokens=20, seed=i, variant=1))
            for i in range(3)
        ]
        same = target.submit(renamed(request, "same"))
        await target.advance(2)
        assert await kv_movable(target).import_kv(blocks) == len(blocks)
        await target.finish(same, *others)
        assert same.tokens[0] == tokens
        await assert_answer(target, request, tokens, len(blocks))
        await target.assert_empty()


CASES: tuple[Case, ...] = cases_in(__name__)
