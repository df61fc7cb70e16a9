"""Blocks of the sim engine: bytes that must be right, prompts computed for others, what is told of them at rest."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import is_empty, make_request
from tests.unit.engines.test_sim import Steps, run_engine

from kvolt.core.errors import Cancelled, EngineFailed
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.kv_block import KvBlock
from kvolt.core.kv_events import Cleared, Stored
from kvolt.core.latency import LatencyModel
from kvolt.engines.sim import SimArguments, SimEngine
from kvolt.engines.sim_kv import BLOCK_BYTES, SimMemory
from kvolt.kv import BlockId
from kvolt.runtime.tasks import Scope

STEP = LatencyModel(base_s=1.0)
ARGUMENTS = SimArguments(latency=STEP, hold_s=50.0)
KEYS = [BlockKey(bytes([number]) * 16) for number in range(3)]
BLOCKS = [BlockId(0), BlockId(1), BlockId(2)]


def test_blocks_are_known_by_their_bytes() -> None:
    memory = SimMemory()
    assert memory.confusion(BLOCKS[:1], KEYS[:1]), "a block that was never filled"
    for block, key in zip(BLOCKS, KEYS, strict=True):
        memory.compute(block, key)
        assert len(memory.read(block)) == BLOCK_BYTES
    assert memory.confusion(BLOCKS, KEYS) == 0
    swapped = memory.confusion([BLOCKS[1], BLOCKS[0]], KEYS[:2])
    memory.write(BLOCKS[2], bytes([memory.read(BLOCKS[2])[0] ^ 1]) + memory.read(BLOCKS[2])[1:])
    flipped = memory.confusion(BLOCKS, KEYS)
    assert len({0, swapped, flipped}) == 3
    assert memory.confusion(BLOCKS[:2], KEYS[:2]) == 0, "its neighbours are as they were"


def damaged(block: KvBlock) -> KvBlock:
    """Wrong, and sealed as if it were right."""
    return replace(block, data=bytes([block.data[0] ^ 1]) + block.data[1:]).seal()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("say", [None, "all that there is to say of it and then some more of it"])
def test_an_answer_from_wrong_bytes_is_a_wrong_answer(at: int, say: str | None) -> None:
    request = make_request(prompt=50, tokens=10)

    async def right(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(60)
        expected.extend(steps.tokens("r"))
        blocks.extend(await engine.export_kv(engine.kv_keys(request)))

    async def wrong(engine: SimEngine, steps: Steps) -> None:
        given = [damaged(block) if index == at else block for index, block in enumerate(blocks)]
        assert await engine.import_kv(given) == 3
        engine.submit(request)
        await asyncio.sleep(60)
        assert steps.deltas("r")[0].cached_tokens == 48
        said = steps.tokens("r")
        assert sum(one == other for one, other in zip(said, expected, strict=True)) < 3, (
            "hardly a token is right"
        )
        await engine.clear_kv()
        engine.submit(replace(request, request_id=RequestId("again")))
        await asyncio.sleep(60)
        assert steps.tokens("again") == expected, "computed anew it is right again"

    expected: list[int] = []
    blocks: list[KvBlock] = []
    run_engine(replace(ARGUMENTS, say=say), right)
    assert len(blocks) == 3
    run_engine(replace(ARGUMENTS, say=say), wrong)


def test_what_happens_at_rest_is_told_at_once() -> None:
    request = make_request(prompt=50, tokens=1)

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(10)
        blocks = await engine.export_kv(engine.kv_keys(request))
        assert await engine.clear_kv() == 3
        await asyncio.sleep(0)
        assert await engine.import_kv(blocks[:2]) == 2
        await asyncio.sleep(0)
        assert [time for time, _ in steps] == [1.0, 10.0, 10.0]
        assert [type(change) for _, step in steps for change in step.kv_changes] == [Stored, Cleared, Stored]
        assert await engine.match(request) == 32

    run_engine(ARGUMENTS, body)


def test_a_kept_prompt_is_let_go_when_its_time_is_over() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        first = await engine.prefill(make_request("first", prompt=33))
        await asyncio.sleep(9)
        await engine.prefill(replace(make_request("second", prompt=65), salt="other"))
        assert first.expires_in_s == 50.0
        await asyncio.sleep(100)
        used = [(time, step.load.kv_used_blocks) for time, step in steps if step.load is not None]
        assert used == [(1.0, 3), (11.0, 8), (51.0, 5), (61.0, 0)]
        assert is_empty(engine)

    run_engine(ARGUMENTS, body)


def test_who_waits_for_kept_blocks_goes_on_when_they_are_let_go() -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        await engine.prefill(make_request("held", prompt=60))
        engine.submit(replace(make_request("waits", prompt=40, tokens=2), salt="other"))
        await asyncio.sleep(9)
        assert (engine.load().running, engine.load().waiting) == (0, 1)
        await engine.release_prefill(RequestId("held"))
        await asyncio.sleep(10)
        assert steps.ends() == ["waits"]

    run_engine(replace(ARGUMENTS, kv_blocks=5), body)


def test_a_resumed_answer_is_prefilled_as_if_it_went_on() -> None:
    """With `min_tokens` to come, whose end must not be said before."""
    request = make_request(tokens=8)
    request = replace(request, stop=replace(request.stop, min_tokens=6))

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(20)
        whole = steps.tokens("r")
        assert len(whole) == 7
        for cut in range(1, 7):
            resumed = replace(request, request_id=RequestId(f"cut{cut}"), resume=tuple(whole[:cut]))
            handoff = await engine.prefill(resumed)
            assert handoff.first_tokens == (None if cut == 6 else (whole[cut],)), cut

    run_engine(replace(ARGUMENTS, words=2), body)


@pytest.mark.parametrize(("stop", "error"), [("abort", Cancelled), ("close", EngineFailed)])
def test_a_prompt_that_is_stopped_tells_who_waits_for_it(stop: str, error: type[Exception]) -> None:
    async def body(engine: SimEngine, steps: Steps) -> None:
        async with Scope("prefill") as scope:
            asking = scope.start(_error_of(engine), "prefill")
            await asyncio.sleep(0.5)
            if stop == "abort":
                engine.abort(RequestId("r"))
            else:
                await engine.close()
        assert isinstance(asking.result(), error)
        await asyncio.sleep(2)
        assert is_empty(engine)

    run_engine(ARGUMENTS, body)


async def _error_of(engine: SimEngine) -> BaseException | None:
    try:
        await engine.prefill(make_request(choices=2))
    except (Cancelled, EngineFailed) as error:
        return error
    return None
