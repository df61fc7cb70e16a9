"""KV of the sim engine on shared links: moving blocks takes time, and longer when others move theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.errors import ConfigError
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import check_arguments
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.kv import BlockId
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

SPEC = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
PLAIN = SimArguments(latency=LatencyModel(base_s=0.001))
BLOCK = 16 * 1000
"""Bytes of a block with a thousand bytes per token."""
LINKED = replace(PLAIN, kv_bytes_per_token=1000, link_in_bytes_per_s=BLOCK)

T = TypeVar("T")


def prompt(first: int) -> Request:
    """A prompt of four blocks. `first` makes other blocks of them."""
    return replace(make_request(), token_ids=(first + 3, *range(4, 3 + 64), 1))


async def receive(engine: SimEngine, first: int = 0) -> int:
    """Number of blocks that are found after four have been received."""
    keys = engine.kv_keys(prompt(first))
    hashes = [SequenceHash(100 * first + number) for number in range(len(keys))]
    allocation = await engine.allocate_kv(keys, hashes)
    await engine.commit_kv(allocation, len(allocation.blocks))
    return await engine.match(prompt(first)) // 16


async def took(work: Awaitable[T]) -> tuple[T, float]:
    """The result, and how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await work, loop.time() - began


def test_without_links_moving_takes_no_time() -> None:
    async def main() -> None:
        assert await took(receive(SimEngine(SPEC, PLAIN))) == (4, 0.0)

    run_virtual(main)


def test_two_that_come_in_at_once_take_twice_as_long() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        assert await took(receive(engine)) == (4, pytest.approx(4.0))
        both = await asyncio.gather(took(receive(engine, 9)), took(receive(engine, 10)))
        assert both == [(4, pytest.approx(8.0)), (4, pytest.approx(8.0))]

    run_virtual(main)


def test_blocks_are_found_when_they_have_arrived_and_not_before() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        coming = asyncio.get_running_loop().create_task(receive(engine))
        await asyncio.sleep(3.9)
        assert await engine.match(prompt(0)) == 0
        assert await coming == 4

    run_virtual(main)


def test_speed_and_latency() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, replace(LINKED, link_latency_s=0.5))
        assert await took(receive(engine)) == (4, pytest.approx(4.5))
        engine = SimEngine(SPEC, replace(LINKED, link_latency_s=0.5, speed=10.0))
        assert await took(receive(engine)) == (4, pytest.approx(0.45))

    run_virtual(main)


def test_a_move_that_is_given_up_is_given_to_the_others() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        given_up = asyncio.get_running_loop().create_task(receive(engine, 9))
        staying = asyncio.get_running_loop().create_task(took(receive(engine)))
        await asyncio.sleep(2.0)
        given_up.cancel()
        assert await staying == (4, pytest.approx(5.0))
        assert await engine.match(prompt(9)) == 0

    run_virtual(main)


def test_an_engine_that_closes_gets_nothing_more() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        coming = asyncio.get_running_loop().create_task(receive(engine))
        await asyncio.sleep(0.5)
        await engine.close()
        assert await coming == 0

    run_virtual(main)


def test_a_handoff_waits_for_its_blocks() -> None:
    """Prefill here, decode there: what lies between is the link, and the answer is the same."""

    async def main() -> None:
        source, target = SimEngine(SPEC, PLAIN), SimEngine(SPEC, LINKED)
        request = make_request(prompt=64, tokens=4)

        async def answer(engine: SimEngine) -> list[int]:
            tokens: list[int] = []
            async for step in engine.steps():
                tokens += step.plain_tokens
                for _, delta in step.deltas:
                    tokens += delta.token_ids
                    if delta.finish is not None:
                        return tokens
            return tokens

        async def read(engine: SimEngine) -> None:
            async for _ in engine.steps():
                pass

        async with Scope("source") as scope:
            scope.start(read(source), "steps")
            handoff = await source.prefill(request)
            held = await source.held_kv(RequestId("r"))
            allocation = await target.allocate_kv(held.keys, held.hashes)
            for theirs, ours in zip(held.blocks, allocation.blocks, strict=True):
                target._memory.write(BlockId(ours), source._memory.read(BlockId(theirs)))
            _, time_s = await took(target.commit_kv(allocation, len(held.blocks)))
            assert time_s == pytest.approx(4.0)
            await source.release_prefill(RequestId("r"))
            target.submit(replace(request, handoff=handoff))
            assert handoff.first_tokens is not None
            told = [*handoff.first_tokens, *await answer(target)]
            alone = SimEngine(SPEC, PLAIN)
            alone.submit(request)
            assert told == await answer(alone)
            await source.close()

    run_virtual(main)


def test_on_paper_nothing_travels() -> None:
    with pytest.raises(ConfigError, match="trace blocks have no content to transfer"):
        check_arguments("sim", {"trace_blocks": True, "link_in_bytes_per_s": 1e9})
    with pytest.raises(ConfigError, match="link_in_bytes_per_s"):
        check_arguments("sim", {"link_in_bytes_per_s": 0})
