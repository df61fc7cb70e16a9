"""Requests of which only hashes are known."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.request import Request, Role, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.kv import TraceNaming
from kvolt.runtime.tasks import Scope
from kvolt.testing.virtual.loop import run_virtual


def request(name: str, length: int, hashes: tuple[int, ...], block_size: int = 4) -> Request:
    return Request(
        request_id=RequestId(name),
        model="sim-tiny",
        token_ids=(0,) * length,
        block_size=block_size,
        sequence_hashes=tuple(SequenceHash(each) for each in hashes),
        stop=StopConditions(max_tokens=9, ignore_eos=True),
    )


def test_equal_hashes_are_equal_blocks_and_generated_blocks_are_unique() -> None:
    one, other = TraceNaming(request("a", 10, (7, 8)), 4), TraceNaming(request("b", 9, (7, 9)), 4)
    assert one.names[0] == other.names[0]
    assert one.names[1] != other.names[1]
    for naming in (one, other):
        naming.reach([], 4)
        naming.reach([], 3)
        assert len(set(naming.names.keys)) == len(naming.names) == 4
    assert set(one.names.keys[2:]).isdisjoint(other.names.keys)


@pytest.mark.parametrize(("hashes", "block_size"), [((7,), 4), ((), 4), ((7, 8), 8)])
def test_too_few_hashes_are_refused(hashes: tuple[int, ...], block_size: int) -> None:
    with pytest.raises(InvalidRequest, match="needs the hashes"):
        TraceNaming(request("a", 10, hashes, block_size), 4)


def test_an_engine_on_paper_promises_no_more_than_it_has() -> None:
    async def scenario() -> None:
        spec = EngineSpec(model="sim-tiny", role=Role.AGGREGATED)
        engine = SimEngine(spec, SimArguments(trace_blocks=True, block_size=4, merge_steps=True))
        info = await engine.start()
        assert info.features == ("KvEvents", "KvAddressable", "Prefill")
        with pytest.raises(Unsupported):
            engine.kv_slabs()
        assert info.kv_layout is None
        with pytest.raises(InvalidRequest):
            engine.submit(request("bad", 10, ()))
        engine.submit(request("good", 10, (7, 8)))
        told = []
        async for step in engine.steps():
            told += [delta for _, delta in step.deltas]
            if told and told[-1].finish is not None:
                break
        assert sum(len(delta.token_ids) for delta in told) == 9
        assert len(told) == 2, "the first token, and all others at once"
        await engine.close()

    run_virtual(scenario)


def test_trace_blocks_are_reported_as_they_are_computed() -> None:
    async def scenario() -> None:
        spec = EngineSpec(model="sim-tiny", role=Role.PREFILL)
        arguments = SimArguments(trace_blocks=True, block_size=4, max_batch_tokens=8, max_num_seqs=4)
        engine = SimEngine(spec, arguments)
        await engine.start()
        async with Scope("engine") as scope:
            scope.start(_read(engine), "steps")
            scope.start(engine.prefill(request("a", 18, (5, 6, 7, 8))), "prefill")
            await asyncio.sleep(0)
            told = [await engine.computed_kv(RequestId("a"), after) for after in (0, 2, 4)]
            assert [part.hashes for part in told] == [(5, 6), (5, 6, 7, 8), (5, 6, 7, 8)]
            assert told[-1] == await engine.held_kv(RequestId("a"))
            await engine.close()

    run_virtual(scenario)


@pytest.mark.parametrize("how", ["comes", "never comes"])
def test_blocks_on_paper_are_kept_for_their_request(how: str) -> None:
    async def scenario() -> None:
        arguments = SimArguments(trace_blocks=True, block_size=4, kv_blocks=12, hold_s=2.0)
        engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.DECODE), arguments)
        await engine.start()
        asked = request("a", 18, (5, 6, 7, 8))
        room = await engine.allocate_kv(
            cast("tuple[BlockKey, ...]", asked.sequence_hashes), asked.sequence_hashes
        )
        await engine.commit_kv(room, len(room.blocks), asked.request_id)
        async with Scope("engine") as scope:
            reading = scope.start(_read(engine), "steps")
            for start in range(10, 60, 10):
                engine.submit(request(f"other{start}", 12, (start, start + 1, start + 2)))
                while engine.load().running or engine.load().waiting:
                    await asyncio.sleep(0.01)
            if how == "comes":
                engine.submit(asked)
                reading.cancel()
                async for step in engine.steps():
                    if step.deltas:
                        assert step.deltas[0][1].cached_tokens == 16
                        break
            else:
                assert engine.load().kv_used_blocks == 4
                await asyncio.sleep(2.0)
                assert engine.load().kv_used_blocks == 0
            await engine.close()

    run_virtual(scenario)


async def _read(engine: SimEngine) -> None:
    async for _ in engine.steps():
        pass
