"""The kv-placed tier: blocks that are copied from one engine's memory into another's, past both. For KvPlaced engines.

The cases copy the bytes themselves, as a transfer would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from kvolt.core.block_key import BLOCK_KEY_BYTES
from kvolt.core.errors import NotFound, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import KvEvents, KvHeld, KvMovable, KvPlaced, KvRoom
from kvolt.testing.engines.event_cases import ask_as_told, blocks_request, blocks_that_fit
from kvolt.testing.engines.handoff_cases import prefill_of, prefilled, short_expiry, whole_answer
from kvolt.testing.engines.harness import Case, Harness, NotRun, Run, engine_run
from kvolt.testing.engines.replica import block_hashes
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.slabs import Slab

MOST_TO_FILL = 24
"""Prompts, or rooms, that a case may need to fill a pool."""


def placed(run: Run) -> KvPlaced:
    engine = run.engine
    assert isinstance(engine, KvPlaced)
    return engine


def slabs_of(run: Run) -> tuple[Slab, ...]:
    """Of its ranks; each says what lies in it."""
    try:
        slabs = placed(run).kv_slabs()
    except Unsupported as error:
        raise NotRun(f"its blocks lie where a test cannot copy them: {error.message}") from error
    layouts = [slab.layout for slab in slabs]
    ranks = [(layout.tp_rank, layout.tp_degree) for layout in layouts if layout is not None]
    assert slabs, "blocks lie in no slab"
    assert ranks == [(rank, len(slabs)) for rank in range(len(slabs))], "not one slab for each rank, in order"
    assert len({slab.num_blocks for slab in slabs}) == 1, "a block has not the same number for all ranks"
    return slabs


async def computed(run: Run, request: Request) -> tuple[Handoff, KvHeld]:
    """A prompt for others, and where its blocks lie."""
    handoff = await prefilled(run, request)
    held = await placed(run).hold_kv(request.request_id)
    assert list(held.hashes) == block_hashes(request, run.info.block_size), "the full blocks have other names"
    assert len(held.blocks) == len(set(held.blocks)) == len(held.keys) == len(held.hashes)
    if isinstance(run.engine, KvMovable):
        assert held.keys == run.engine.kv_keys(request)
    return handoff, held


async def released(run: Run, request: Request) -> None:
    await prefill_of(run).release_prefill(request.request_id)
    await run.assert_empty()


def copy_blocks(source: Run, held: KvHeld, target: Run, room: KvRoom) -> None:
    """Those that the room is for."""
    wanted = held.blocks[room.num_present : room.num_present + len(room.blocks)]
    for there, here in zip(slabs_of(source), slabs_of(target), strict=True):
        assert there.layout == here.layout
        block_bytes.copy(
            here.memory,
            here.pieces(here.numbers(room.blocks)).offsets,
            there.memory,
            there.pieces(there.numbers(wanted)).offsets,
            here.block_bytes,
        )


def contents(run: Run, blocks: Sequence[int]) -> list[bytes]:
    return [
        bytes(slab.memory[offset:][: slab.block_bytes])
        for slab in slabs_of(run)
        for offset in slab.numbers(blocks) * slab.block_bytes
    ]


async def move(source: Run, target: Run, request: Request, *, keep: bool = False) -> Request:
    """Compute its prompt at the source and carry its blocks over, there to be kept for it or not; the request as the
    target gets it."""
    handoff, held = await computed(source, request)
    room = await placed(target).make_room(held.keys, held.hashes)
    if room.blocks:
        copy_blocks(source, held, target, room)
        keep_for = request.request_id if keep else None
        await placed(target).settle_kv(room, len(room.blocks), keep_for)
    await prefill_of(source).release_prefill(request.request_id)
    return replace(request, handoff=handoff)


async def blocks_are_copied_past_the_engines(harness: Harness) -> None:
    """Token for token as on one engine, and nothing of what was moved is computed again."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        block_size, num_blocks = whole.info.block_size, blocks_that_fit(whole, 3)
        for index, length in enumerate((block_size - 1 or 1, block_size + 1, num_blocks * block_size + 1)):
            request = whole.request(f"r{index}", prompt=length, tokens=12, seed=index, variant=index % 2)
            expected = await whole.answer(request)
            answer = await target.answer(await move(source, target, request))
            assert whole_answer(answer) == expected.tokens, "other tokens after blocks were copied"
            assert answer.cached == length // block_size * block_size, "what was copied was not found"
            if isinstance(target.engine, KvEvents):
                hashes = block_hashes(request, block_size)
                assert target.replica.num_leading(hashes) == len(hashes), "blocks that came in were not told"
        await source.assert_empty()
        await target.assert_empty()


async def only_what_is_missing_is_asked_for(harness: Harness) -> None:
    async with engine_run(harness) as source, engine_run(harness) as some, engine_run(harness) as all_of_it:
        request = blocks_request(source, "r", _several_blocks(source), tokens=5)
        await move(source, all_of_it, request)
        start = request.token_ids[: source.info.block_size + 1]
        await some.answer(replace(request, request_id=RequestId("start"), token_ids=start))
        _, held = await computed(source, request)
        room = await placed(some).make_room(held.keys, held.hashes)
        assert (room.num_present, len(room.blocks)) == (1, len(held.keys) - 1), "the first block was here"
        await placed(some).settle_kv(room, 0)
        await some.assert_empty()
        room = await placed(all_of_it).make_room(held.keys, held.hashes)
        assert (room.num_present, room.blocks) == (len(held.keys), ()), "all of it was here"
        await all_of_it.assert_empty()
        await released(source, request)


async def what_did_not_come_is_computed(harness: Harness) -> None:
    """Room that was not filled, or in part: never wrong tokens, and the room is free again."""
    async with engine_run(harness) as whole, engine_run(harness) as source:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 3), tokens=9)
        expected = await whole.answer(request)
        handoff, held = await computed(source, request)
        for num_filled in range(len(held.keys)):
            async with engine_run(harness) as target:
                room = await placed(target).make_room(held.keys, held.hashes)
                copy_blocks(source, held, target, KvRoom(0, room.blocks[:num_filled]))
                await placed(target).settle_kv(room, num_filled)
                answer = await target.answer(replace(request, handoff=handoff))
                assert whole_answer(answer) == expected.tokens, "a block that did not come was read"
                assert answer.cached == num_filled * whole.info.block_size
                await target.assert_empty()
        await released(source, request)


async def room_is_nobody_elses(harness: Harness) -> None:
    """It is filled while others compute: neither harms the other."""
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
        room = await placed(target).make_room(held.keys, held.hashes)
        copy_blocks(source, held, target, room)
        await target.finish(*running)
        assert [each.tokens for each in running] == expected_of_others, "the room was taken from who computes"
        assert contents(target, room.blocks) == contents(source, held.blocks), "somebody wrote into the room"
        await placed(target).settle_kv(room, len(room.blocks))
        answer = await target.answer(replace(request, handoff=handoff))
        assert whole_answer(answer) == expected.tokens
        await target.assert_empty()
        await released(source, request)


async def no_two_rooms_share_a_block(harness: Harness) -> None:
    """However many there are: in the end there is less for who asks, or nothing."""
    async with engine_run(harness) as run:
        total, num_blocks, num_rooms = to_fill(run)
        if num_rooms > MOST_TO_FILL:
            raise NotRun(f"a pool of {total} blocks is too large to be filled by a test")
        rooms = [await placed(run).make_room(*strangers(index, num_blocks)) for index in range(num_rooms)]
        given = [block for room in rooms for block in room.blocks]
        assert given, "an engine at rest has no room"
        assert len(given) == len(set(given)), "a block was given to two"
        for slab in slabs_of(run):
            slab.numbers(given)
        for room in rooms:
            assert room.num_present == 0
            if room.blocks:
                await placed(run).settle_kv(room, 0)
        await run.assert_empty()


async def the_same_blocks_come_twice(harness: Harness) -> None:
    """Two who want them at once: they are found once, and what is left over is let go."""
    async with engine_run(harness) as whole, engine_run(harness) as source, engine_run(harness) as target:
        request = blocks_request(whole, "r", blocks_that_fit(whole, 3), tokens=9)
        expected = await whole.answer(request)
        handoff, held = await computed(source, request)
        rooms = [await placed(target).make_room(held.keys, held.hashes) for _ in range(2)]
        for room in rooms:
            copy_blocks(source, held, target, room)
        for room in rooms[::-1]:
            if room.blocks:
                await placed(target).settle_kv(room, len(room.blocks))
        answer = await target.answer(replace(request, handoff=handoff))
        assert whole_answer(answer) == expected.tokens
        assert answer.cached == len(held.keys) * whole.info.block_size
        await target.assert_empty()
        await released(source, request)


async def a_clear_while_blocks_come(harness: Harness) -> None:
    """What they were to follow is forgotten: what is told and found of them is right."""
    async with engine_run(harness) as source, engine_run(harness) as target:
        if not isinstance(target.engine, KvEvents):
            raise NotRun("its blocks cannot be cleared")
        request = blocks_request(source, "r", _several_blocks(source), tokens=9)
        _, held = await computed(source, request)
        start = request.token_ids[: source.info.block_size + 1]
        await target.answer(replace(request, request_id=RequestId("start"), token_ids=start))
        room = await placed(target).make_room(held.keys, held.hashes)
        copy_blocks(source, held, target, room)
        await target.engine.clear_kv()
        await target.until(lambda: bool(target.replica.num_cleared))
        await placed(target).settle_kv(room, len(room.blocks))
        answer = await ask_as_told(target, request)
        await prefill_of(source).release_prefill(request.request_id)
        assert answer.tokens == (await source.answer(request)).tokens
        await source.assert_empty()
        await target.assert_empty()


async def what_is_held_stays(harness: Harness) -> None:
    """However much else is computed, until it is released; then it is not held any more."""
    async with engine_run(harness) as source:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=5)
        _, held = await computed(source, request)
        before = contents(source, held.blocks)
        _, num_blocks, num_others = to_fill(source)
        for index in range(min(num_others, MOST_TO_FILL, num_blocks * source.info.block_size)):
            await source.answer(
                blocks_request(source, f"other{index}", num_blocks, tokens=2, variant=1 + index)
            )
        assert contents(source, held.blocks) == before, "a block that was held has changed"
        assert await placed(source).hold_kv(request.request_id) == held
        await prefill_of(source).release_prefill(request.request_id)
        await _assert_not_held(source, request)
        await source.assert_empty()


async def what_has_expired_is_not_held(harness: Harness) -> None:
    async with engine_run(harness) as source:
        request = blocks_request(source, "r", blocks_that_fit(source, 3), tokens=5)
        handoff, _ = await computed(source, request)
        await asyncio.sleep(short_expiry(handoff) + 0.2)
        await _assert_not_held(source, request)
        await source.assert_empty()


async def _assert_not_held(run: Run, request: Request) -> None:
    for request_id in (request.request_id, RequestId("nobody")):
        try:
            await placed(run).hold_kv(request_id)
        except NotFound:
            continue
        raise AssertionError(f"the blocks of {request_id} are still held")


def _several_blocks(run: Run) -> int:
    num_blocks = blocks_that_fit(run, 3)
    if num_blocks < 2:
        raise NotRun("a prompt of two blocks does not fit")
    return num_blocks


def to_fill(run: Run) -> tuple[int, int, int]:
    """Blocks of the pool; full blocks of a prompt; how many such prompts are more than the pool holds."""
    total = run.info.capacity.kv_total_blocks
    num_blocks = blocks_that_fit(run, max(total // 4, 1))
    return total, num_blocks, total // num_blocks + 1


def strangers(index: int, num_blocks: int) -> tuple[list[BlockKey], list[SequenceHash]]:
    """Names of blocks that nobody has."""
    numbers = range(1 + index * num_blocks, 1 + (index + 1) * num_blocks)
    keys = [BlockKey(number.to_bytes(BLOCK_KEY_BYTES, "little")) for number in numbers]
    return keys, [SequenceHash(number) for number in numbers]


CASES: tuple[Case, ...] = (
    blocks_are_copied_past_the_engines,
    only_what_is_missing_is_asked_for,
    what_did_not_come_is_computed,
    room_is_nobody_elses,
    no_two_rooms_share_a_block,
    the_same_blocks_come_twice,
    a_clear_while_blocks_come,
    what_is_held_stays,
    what_has_expired_is_not_held,
)
