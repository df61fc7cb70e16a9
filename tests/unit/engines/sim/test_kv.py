"""Blocks of the sim engine: bytes that must be right, prompts computed for others, what is told of them at rest."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import is_empty, make_request
from tests.unit.engines.sim.test_engine import Steps, run_engine

from kvolt.core.errors import Cancelled, EngineFailed
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, Stored
from kvolt.core.latency import LatencyModel
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.kv import BLOCK_BYTES, ExpectedKv, SimMemory
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.kv import BlockId
from kvolt.runtime.tasks import Scope

STEP = LatencyModel(base_s=1.0)
ARGUMENTS = SimArguments(latency=STEP, hold_s=50.0)
CONTENTS = [bytes([number]) * 16 for number in range(3)]
BLOCKS = [BlockId(0), BlockId(1), BlockId(2)]


def test_blocks_are_known_by_their_bytes() -> None:
    memory = SimMemory()
    assert memory.check(BLOCKS[:1], CONTENTS[:1]), "a block that was never filled"
    for block, fingerprint in zip(BLOCKS, CONTENTS, strict=True):
        memory.compute(block, fingerprint)
        assert len(memory.read(block)) == BLOCK_BYTES
    assert memory.check(BLOCKS, CONTENTS) == 0
    swapped = memory.check([BLOCKS[1], BLOCKS[0]], CONTENTS[:2])
    memory.write(BLOCKS[2], bytes([memory.read(BLOCKS[2])[0] ^ 1]) + memory.read(BLOCKS[2])[1:])
    flipped = memory.check(BLOCKS, CONTENTS)
    assert len({0, swapped, flipped}) == 3
    assert memory.check(BLOCKS[:2], CONTENTS[:2]) == 0, "its neighbours are as they were"


def damage(engine: SimEngine, key: BlockKey) -> None:
    """Flip a bit of a cached block."""
    block = engine._scheduler.pool.block_of(key)
    assert block is not None
    data = engine._memory.read(block)
    engine._memory.write(block, bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("say", [None, "all that there is to say of it and then some more of it"])
def test_an_answer_from_wrong_bytes_is_a_wrong_answer(at: int, say: str | None) -> None:
    request = make_request(prompt=50, tokens=10)

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(60)
        expected = steps.tokens("r")
        damage(engine, engine.kv_keys(request)[at])
        engine.submit(replace(request, request_id=RequestId("wrong")))
        await asyncio.sleep(60)
        assert steps.deltas("wrong")[0].cached_tokens == 48
        said = steps.tokens("wrong")
        assert sum(one == other for one, other in zip(said, expected, strict=True)) < 3, (
            "hardly a token is right"
        )
        await engine.clear_kv()
        engine.submit(replace(request, request_id=RequestId("again")))
        await asyncio.sleep(60)
        assert steps.tokens("again") == expected, "computed anew it is right again"

    run_engine(replace(ARGUMENTS, answer_text=say), body)


def test_blocks_overwritten_under_a_running_answer_change_it() -> None:
    request = make_request(prompt=64, tokens=40)
    right = answer_tokens(request.token_ids, 1, 40, word_token_ids())

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(10.5)
        block = engine._scheduler.pool.block_of(engine.kv_keys(request)[2])
        assert block is not None
        engine._memory.write(block, bytes(BLOCK_BYTES))
        await asyncio.sleep(60)
        answer = steps.tokens("r")
        assert answer[:10] == right[:10]
        assert sum(one == other for one, other in zip(answer[14:], right[14:], strict=True)) < 5

    run_engine(ARGUMENTS, body)


def test_kv_computed_from_wrong_kv_is_wrong_as_well() -> None:
    """The first block is wrong; the blocks behind it are computed here, and found by the next request."""
    request = make_request(prompt=65, tokens=12)

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(replace(request, request_id=RequestId("first"), token_ids=request.token_ids[:17]))
        await asyncio.sleep(20)
        keys = engine.kv_keys(request)
        damage(engine, keys[0])

        def contents() -> list[bytes]:
            blocks = [engine._scheduler.pool.block_of(key) for key in keys]
            return [engine._memory.read(block) for block in blocks if block is not None]

        engine.submit(replace(request, request_id=RequestId("second")))
        await asyncio.sleep(20)
        poisoned = contents()
        await engine.clear_kv()
        engine.submit(replace(request, request_id=RequestId("third")))
        await asyncio.sleep(20)
        sound = contents()
        assert len(poisoned) == len(sound) == 4
        assert all(one != other for one, other in zip(poisoned, sound, strict=True))
        right = answer_tokens(request.token_ids, 1, 12, word_token_ids())
        assert steps.tokens("third") == right != steps.tokens("second")

    run_engine(ARGUMENTS, body)


@pytest.mark.parametrize("field", ["salt", "lora"])
def test_kv_of_another_tenant_or_adapter_is_wrong_kv(field: str) -> None:
    request = make_request(prompt=40)
    changed: dict[str, str] = {field: "other"}
    other = replace(request, **changed)  # type: ignore[arg-type]
    fingerprints = []
    for each in (request, other):
        expected = ExpectedKv("m", 16, each)
        expected.reach([*each.token_ids], 2)
        fingerprints.append(expected.fingerprints)
    assert not set(fingerprints[0]) & set(fingerprints[1])


def test_changes_without_a_step_are_reported_at_once() -> None:
    request = make_request(prompt=50, tokens=1)

    async def body(engine: SimEngine, steps: Steps) -> None:
        engine.submit(request)
        await asyncio.sleep(10)
        assert await engine.clear_kv() == 3
        await asyncio.sleep(0)
        allocation = await engine.allocate_kv(engine.kv_keys(request)[:2], [SequenceHash(1), SequenceHash(2)])
        await engine.commit_kv(allocation, 2)
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
            resumed = replace(request, request_id=RequestId(f"cut{cut}"), prior_tokens=tuple(whole[:cut]))
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
