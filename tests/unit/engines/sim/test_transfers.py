"""KV of the sim engine on shared links: moving blocks takes time, and longer when others move theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.block_key import KvBlock
from kvolt.core.errors import ConfigError
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import check_arguments
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.links import SimLink
from kvolt.engines.sim.transfers import NETWORK_IN, NETWORK_OUT, SimTransfers
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

SPEC = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
PLAIN = SimArguments(latency=LatencyModel(base_s=0.001))
BLOCK = 16 * 1000
"""Bytes of a block with a thousand bytes per token."""
LINKED = replace(PLAIN, kv_bytes_per_token=1000, link_in_bytes_per_s=BLOCK, link_out_bytes_per_s=2 * BLOCK)

T = TypeVar("T")


async def blocks_of(num_blocks: int, first: int = 0) -> list[KvBlock]:
    """Made by an engine without links. `first` makes other blocks of them."""
    engine = SimEngine(SPEC, PLAIN)
    request = replace(make_request(tokens=1), token_ids=(first + 3, *range(4, 3 + 16 * num_blocks)))
    async with Scope("source") as scope:

        async def read() -> None:
            async for _ in engine.steps():
                pass

        scope.start(read(), "steps")
        engine.submit(request)
        await asyncio.sleep(1.0)
        blocks = await engine.export_kv(engine.kv_keys(request))
        await engine.close()
    assert len(blocks) == num_blocks
    return list(blocks)


async def took(work: Awaitable[T]) -> tuple[T, float]:
    """The result, and how long it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await work, loop.time() - began


def test_without_links_moving_takes_no_time() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, PLAIN)
        blocks = await blocks_of(4)
        assert await took(engine.import_kv(blocks)) == (4, 0.0)
        exported, time_s = await took(engine.export_kv([block.key for block in blocks]))
        assert (len(exported), time_s) == (4, 0.0)

    run_virtual(main)


def test_moving_takes_as_long_as_the_link_says() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        blocks = await blocks_of(4)
        assert await took(engine.import_kv(blocks)) == (4, pytest.approx(4.0))
        exported, time_s = await took(engine.export_kv([block.key for block in blocks]))
        assert (list(exported), time_s) == (blocks, pytest.approx(2.0)), "the way out is twice as fast"

    run_virtual(main)


def test_two_that_come_in_at_once_take_twice_as_long() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        one, other = await blocks_of(4), await blocks_of(4, first=9)
        both = await asyncio.gather(took(engine.import_kv(one)), took(engine.import_kv(other)))
        assert both == [(4, pytest.approx(8.0)), (4, pytest.approx(8.0))]
        # What goes out is on another wire.
        crossing = await asyncio.gather(
            took(engine.import_kv(one)), took(engine.export_kv([block.key for block in other]))
        )
        assert [time_s for _, time_s in crossing] == [pytest.approx(4.0), pytest.approx(2.0)]

    run_virtual(main)


def test_blocks_are_found_when_they_have_arrived_and_not_before() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        blocks = await blocks_of(4)
        request = replace(make_request(), token_ids=(3, *range(4, 3 + 64), 1))
        coming = asyncio.get_running_loop().create_task(engine.import_kv(blocks))
        await asyncio.sleep(3.9)
        assert await engine.match(request) == 0
        await coming
        assert await engine.match(request) == 64

    run_virtual(main)


def test_speed_and_latency() -> None:
    async def main() -> None:
        blocks = await blocks_of(4)
        engine = SimEngine(SPEC, replace(LINKED, link_latency_s=0.5))
        assert await took(engine.import_kv(blocks)) == (4, pytest.approx(4.5))
        engine = SimEngine(SPEC, replace(LINKED, link_latency_s=0.5, speed=10.0))
        assert await took(engine.import_kv(blocks)) == (4, pytest.approx(0.45))

    run_virtual(main)


def test_engines_of_one_machine_may_share_its_links() -> None:
    async def main() -> None:
        links = [SimLink(NETWORK_IN, BLOCK), SimLink(NETWORK_OUT, BLOCK)]
        shared = SimTransfers(links, asyncio.get_running_loop().time)
        engines = [
            SimEngine(SPEC, replace(PLAIN, kv_bytes_per_token=1000), transfers=shared) for _ in range(3)
        ]
        blocks = await blocks_of(2)
        moved = await asyncio.gather(*(took(engine.import_kv(blocks)) for engine in engines))
        assert moved == [(2, pytest.approx(6.0))] * 3
        await engines[0].close()
        assert await took(engines[1].import_kv(blocks)) == (2, pytest.approx(2.0)), "the others go on"

    run_virtual(main)


def test_a_move_that_is_given_up_is_given_to_the_others() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        one, other = await blocks_of(4), await blocks_of(4, first=9)
        loop = asyncio.get_running_loop()
        given_up = loop.create_task(engine.import_kv(other))
        staying = loop.create_task(took(engine.import_kv(one)))
        await asyncio.sleep(2.0)
        given_up.cancel()
        assert await staying == (4, pytest.approx(5.0))
        assert await engine.match(replace(make_request(), token_ids=(12, *range(4, 3 + 64), 1))) == 0

    run_virtual(main)


def test_an_engine_that_closes_gets_and_gives_nothing_more() -> None:
    async def main() -> None:
        engine = SimEngine(SPEC, LINKED)
        blocks = await blocks_of(4)
        await engine.import_kv(blocks)
        loop = asyncio.get_running_loop()
        coming = loop.create_task(engine.import_kv(await blocks_of(4, first=9)))
        going = loop.create_task(engine.export_kv([block.key for block in blocks]))
        await asyncio.sleep(0.5)
        await engine.close()
        assert (await coming, await going) == (0, ())

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
            blocks = await source.export_kv(source.kv_keys(request))
            num_here, time_s = await took(target.import_kv(blocks))
            assert (num_here, time_s) == (len(blocks), pytest.approx(len(blocks)))
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
    with pytest.raises(ConfigError, match="link_out_bytes_per_s"):
        check_arguments("sim", {"link_out_bytes_per_s": 0})
