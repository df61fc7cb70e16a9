"""Decode-first: KV that is fetched while its prompt is computed, by real agents between two engines."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace
from tests.unit.worker.kv.test_handoffs import (
    BLOCK,
    ENGINE,
    PREFILL,
    SCARCE,
    Side,
    at_rest,
    crowd,
    request,
    side,
    whole,
)
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import SequenceHasher
from kvolt.core.request import Rendezvous, Request
from kvolt.worker.kv import rendezvous as rendezvous_module

CHUNKED = replace(ENGINE, max_batch_tokens=2 * BLOCK, max_num_seqs=8)
"""A prompt of five blocks is computed in three steps."""
SLOW = replace(CHUNKED, speed=0.1)
ROOM = 1 << 40


def asked(name: str = "r", num_tokens: int = 5 * BLOCK + 3) -> Request:
    plain = request(name, num_tokens)
    hashes = tuple(SequenceHasher(BLOCK).extend(plain.token_ids))
    return replace(plain, block_size=BLOCK, sequence_hashes=hashes)


def rendezvous_at(prefill: Side, room: int = ROOM) -> Rendezvous:
    return Rendezvous(room, prefill.handoffs.rendezvous_address)


async def pushed(prefill: Side, wanted: Request, rendezvous: Rendezvous) -> None:
    handoff = await prefill.handoffs.serve_rendezvous(replace(wanted, prefill_only=True), rendezvous, PREFILL)
    assert handoff.ticket == b""  # there is nothing left to be fetched
    assert handoff.first_tokens is None  # decode tells them


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("near", [True, False])
async def test_either_side_may_come_first(first: str, near: bool) -> None:
    wanted = asked()
    expected = await whole(wanted)
    async with side(CHUNKED) as prefill, side(near=near) as decode:
        rendezvous = rendezvous_at(prefill)
        if first == "decode":
            receiving = asyncio.ensure_future(decode.handoffs.pull_rendezvous(wanted, rendezvous))
            await asyncio.sleep(0.05)
            await pushed(prefill, wanted, rendezvous)
        else:
            await pushed(prefill, wanted, rendezvous)
            receiving = asyncio.ensure_future(decode.handoffs.pull_rendezvous(wanted, rendezvous))
        pulled = await receiving
        assert (pulled.num_blocks, pulled.path) == (5, "shm" if near else "tcp")
        assert await decode.answer(wanted) == expected
        assert decode.cached("r") == 5 * BLOCK
        await at_rest(prefill, decode)
        assert not prefill.handoffs.stats.failures


async def test_blocks_leave_while_the_prompt_is_computed() -> None:
    async with side(SLOW) as prefill, side() as decode:
        rendezvous = rendezvous_at(prefill)
        receiving = asyncio.ensure_future(decode.handoffs.pull_rendezvous(asked(), rendezvous))
        pushing = asyncio.ensure_future(pushed(prefill, asked(), rendezvous))
        async with asyncio.timeout(MUST_HAPPEN_S):
            while not decode.handoffs.stats.num_blocks:
                await asyncio.sleep(0.002)
        assert not pushing.done()  # a part is here, and the prompt is not computed
        await pushing
        assert (await receiving).num_blocks == 5
        await at_rest(prefill, decode)


async def test_what_decode_has_is_not_moved() -> None:
    async with side(CHUNKED) as prefill, side() as decode:
        await decode.answer(asked("before", 3 * BLOCK))
        await asyncio.gather(
            pushed(prefill, asked(), rendezvous_at(prefill)),
            decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill)),
        )
        assert decode.handoffs.stats.num_blocks == 2
        await at_rest(prefill, decode)


async def test_a_prompt_that_decode_has_is_turned_down() -> None:
    async with side(CHUNKED) as prefill, side() as decode:
        await decode.answer(asked("before"))
        pulled, _ = await asyncio.gather(
            decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill)),
            pushed(prefill, asked(), rendezvous_at(prefill)),
        )
        assert pulled.num_blocks == 0
        await at_rest(prefill, decode)  # long before its time is over


async def test_a_prefill_worker_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "BEGIN_S", 0.05)
    wanted = asked()
    expected = await whole(wanted)
    async with side() as prefill, side() as decode:
        assert (await decode.handoffs.pull_rendezvous(wanted, rendezvous_at(prefill))).num_blocks == 0
        assert await decode.answer(wanted) == expected
        assert decode.handoffs.stats.failures == {"deadline_exceeded": 1}
        await at_rest(decode)


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_one_side_goes_in_the_middle(who: str) -> None:
    wanted = asked()
    expected = await whole(wanted)
    async with side(SLOW) as prefill, side() as decode:
        rendezvous = rendezvous_at(prefill)
        receiving = asyncio.ensure_future(decode.handoffs.pull_rendezvous(wanted, rendezvous))
        pushing = asyncio.ensure_future(pushed(prefill, wanted, rendezvous))
        async with asyncio.timeout(MUST_HAPPEN_S):
            while not decode.handoffs.stats.num_blocks:
                await asyncio.sleep(0.002)
        (pushing if who == "prefill" else receiving).cancel()
        if who == "prefill":
            pulled = await receiving
            assert 0 < pulled.num_blocks < 5
            assert await decode.answer(wanted) == expected
            assert decode.handoffs.stats.failures == {"not_found": 1}
        else:
            await asyncio.wait([receiving, pushing])
            prefill.handoffs.drop(wanted.request_id)
        await at_rest(prefill, decode)


async def test_what_is_no_part_is_a_miss() -> None:
    async with side() as prefill, side() as decode:
        prefill.agent.post(ROOM, b"\xc1", 5.0)
        assert (await decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill))).num_blocks == 0
        assert decode.handoffs.stats.failures == {"protocol": 1}
        await at_rest(decode)


async def test_a_second_prompt_of_the_same_name_leaves_the_first_alone() -> None:
    async with side(SLOW) as prefill, side() as decode:
        receiving = asyncio.ensure_future(decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill)))
        pushing = asyncio.ensure_future(pushed(prefill, asked(), rendezvous_at(prefill)))
        await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequest):
            await pushed(prefill, asked(), rendezvous_at(prefill, ROOM + 1000))
        await pushing
        assert (await receiving).num_blocks == 5
        await at_rest(prefill, decode)


async def test_what_came_too_late_shows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were let go of before they were fetched: decode does not wait for more."""
    monkeypatch.setattr(rendezvous_module, "BEGIN_S", 2 * MUST_HAPPEN_S)
    async with side(CHUNKED, pull_s=0.05) as prefill, side() as decode:
        await pushed(prefill, asked(), rendezvous_at(prefill))
        await at_rest(prefill)
        async with asyncio.timeout(MUST_HAPPEN_S):
            assert (await decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill))).num_blocks == 0
        await at_rest(decode)


async def test_a_room_that_cannot_be_leaves_nothing() -> None:
    async with side(CHUNKED) as prefill:
        with pytest.raises(InvalidRequest):
            await pushed(prefill, asked(), rendezvous_at(prefill, -1))
        async with asyncio.timeout(MUST_HAPPEN_S):
            while prefill.handoffs.drop(asked().request_id):
                await asyncio.sleep(0.001)
        await at_rest(prefill)


async def test_only_the_way_of_kv_is_counted_as_its_time() -> None:
    very_slow = replace(CHUNKED, speed=0.03)
    async with side(very_slow) as prefill, side() as decode:
        started_at = time.monotonic()
        pulled, _ = await asyncio.gather(
            decode.handoffs.pull_rendezvous(asked(), rendezvous_at(prefill)),
            pushed(prefill, asked(), rendezvous_at(prefill)),
        )
        assert pulled.took_s < (time.monotonic() - started_at) / 2, "the prompt takes most of the time"
        assert decode.handoffs.stats.pull_s == pulled.took_s
        await at_rest(prefill, decode)


async def test_received_blocks_are_kept_for_their_request() -> None:
    wanted = asked()
    async with side(CHUNKED) as prefill, side(SCARCE) as decode:
        pulled, _ = await asyncio.gather(
            decode.handoffs.pull_rendezvous(wanted, rendezvous_at(prefill), keep_for=wanted.request_id),
            pushed(prefill, wanted, rendezvous_at(prefill)),
        )
        assert pulled.num_blocks == decode.num_used == 5
        await crowd(decode)
        await decode.answer(wanted)
        assert decode.cached("r") == 5 * BLOCK
        await at_rest(prefill, decode)


async def test_received_parts_are_not_kept_for_a_cancelled_request() -> None:
    async with side(SLOW) as prefill, side() as decode:
        rendezvous = rendezvous_at(prefill)
        receiving = asyncio.ensure_future(
            decode.handoffs.pull_rendezvous(asked(), rendezvous, keep_for=asked().request_id)
        )
        pushing = asyncio.ensure_future(pushed(prefill, asked(), rendezvous))
        async with asyncio.timeout(MUST_HAPPEN_S):
            while not decode.handoffs.stats.num_blocks:
                await asyncio.sleep(0.002)
        receiving.cancel()
        await asyncio.wait([receiving, pushing])
        prefill.handoffs.drop(asked().request_id)
        await at_rest(prefill, decode)
