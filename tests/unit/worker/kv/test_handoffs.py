"""Handoffs: prompts that one engine computes and another goes on with, their KV carried by transfer agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from msgspec.structs import replace
from tests.waits import MUST_HAPPEN_S

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request, Role, StopConditions
from kvolt.engines.contract import EngineSpec, KvAllocation
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.runtime.tasks import Scope
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.worker.kv.handoffs import Handoffs, HandoffTicket
from kvolt.worker.kv.mover import AgentMover

BLOCK = 16
ENGINE = SimArguments(speed=1000.0, block_size=BLOCK, kv_blocks=64)
PREFILL = InstanceId("p0")


@dataclass
class Side:
    """An engine of a role with its half of handoffs, and what it says."""

    engine: SimEngine
    handoffs: Handoffs
    agent: TransferAgent
    said: dict[RequestId, list[Delta]]

    async def answer(self, request: Request) -> list[int]:
        self.engine.submit(request)
        said = self.said[request.request_id] = []
        while not (said and said[-1].finish):
            await asyncio.sleep(0.001)
        return [token for delta in said for token in delta.token_ids]

    def cached(self, request_id: str) -> int | None:
        return self.said[RequestId(request_id)][0].cached_tokens

    @property
    def num_used(self) -> int:
        return self.engine.load().kv_used_blocks


@asynccontextmanager
async def side(
    arguments: SimArguments = ENGINE, pull_s: float = 2 * MUST_HAPPEN_S, near: bool = True
) -> AsyncIterator[Side]:
    engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.DECODE), arguments)
    await engine.start()
    agent = TransferAgent(TransferOptions(shared_memory=near))
    slabs = engine.kv_slabs()
    loop = asyncio.get_running_loop()
    found = Side(engine, Handoffs(engine, AgentMover(agent, slabs), loop.time, pull_s), agent, {})

    async def listen() -> None:
        async for step in engine.steps():
            for request_id, delta in step.deltas:
                found.said.setdefault(request_id, []).append(delta)
            for request_id, token in zip(step.plain_ids, step.plain_tokens, strict=True):
                found.said.setdefault(request_id, []).append(Delta(token_ids=(token,)))

    async with Scope("side") as scope:
        scope.start(listen(), "listen")
        try:
            yield found
        finally:
            await found.handoffs.close()
            agent.close()
            await engine.close()
            scope.cancel()


def request(name: str = "r", num_tokens: int = 5 * BLOCK + 3, **more: object) -> Request:
    return Request(
        request_id=RequestId(name),
        model="sim-tiny",
        token_ids=tuple(range(10, 10 + num_tokens)),
        stop=StopConditions(max_tokens=8, ignore_eos=True),
        **more,  # type: ignore[arg-type]
    )


async def whole(asked: Request) -> list[int]:
    async with side() as alone:
        return await alone.answer(asked)


def after_first(handoff: Handoff, tokens: list[int]) -> list[int]:
    assert handoff.first_tokens is not None
    return [*handoff.first_tokens, *tokens]


async def at_rest(*sides: Side) -> None:
    """Nothing is held for anybody."""
    async with asyncio.timeout(MUST_HAPPEN_S):
        while any(each.num_used for each in sides):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("near", [True, False])
async def test_decode_continues_with_the_prefill_worker_kv(near: bool) -> None:
    asked = request()
    expected = await whole(asked)
    async with side() as prefill, side(near=near) as decode:
        handoff = await prefill.handoffs.serve_prefill(asked, PREFILL)
        assert handoff.prefill_instance == PREFILL
        assert handoff.cached_tokens == 0
        assert prefill.num_used > 0
        pulled = await decode.handoffs.pull(handoff)
        assert (pulled.num_blocks, pulled.path) == (5, "shm" if near else "tcp")
        tokens = await decode.answer(replace(asked, handoff=handoff))
        assert after_first(handoff, tokens) == expected
        assert decode.cached("r") == 5 * BLOCK
        await at_rest(prefill, decode)
        assert decode.handoffs.stats.by_path == {pulled.path: 5}


async def test_what_decode_has_is_not_moved() -> None:
    async with side() as prefill, side() as decode:
        await decode.answer(request("before", 3 * BLOCK))
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)
        assert (await decode.handoffs.pull(handoff)).num_blocks == 2
        await decode.answer(replace(request(), handoff=handoff))
        again = await prefill.handoffs.serve_prefill(request("again"), PREFILL)
        assert again.cached_tokens == 5 * BLOCK
        assert (await decode.handoffs.pull(again)).num_blocks == 0
        await at_rest(prefill, decode)  # also what nobody had to fetch


async def test_a_prompt_of_less_than_a_block_moves_nothing() -> None:
    asked = request(num_tokens=BLOCK - 1)
    expected = await whole(asked)
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(asked, PREFILL)
        assert handoff.ticket == b""
        assert (await decode.handoffs.pull(handoff)).num_blocks == 0
        tokens = await decode.answer(replace(asked, handoff=handoff))
        assert after_first(handoff, tokens) == expected
        await at_rest(prefill, decode)


@pytest.mark.parametrize("how", ["gone", "nonsense", "expired", "taken by another"])
async def test_what_does_not_come_is_computed_again(how: str) -> None:
    asked = request()
    expected = await whole(asked)
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(side())
        prefill = await stack.enter_async_context(
            side(replace(ENGINE, hold_s=0.05 if how == "expired" else 30.0))
        )
        handoff = await prefill.handoffs.serve_prefill(asked, PREFILL)
        if how == "gone":
            prefill.agent.close()
        elif how == "nonsense":
            handoff = replace(handoff, ticket=b"nonsense")
        elif how == "expired":
            await at_rest(prefill)
        else:
            other = await stack.enter_async_context(side())
            await other.handoffs.pull(handoff)
        assert (await decode.handoffs.pull(handoff)).num_blocks == 0
        tokens = await decode.answer(replace(asked, handoff=handoff))
        assert after_first(handoff, tokens) == expected
        assert decode.cached("r") == 0
        assert sum(decode.handoffs.stats.failures.values()) == 1
        await at_rest(decode)


async def test_who_goes_leaves_nothing() -> None:
    async with side() as prefill, side() as decode:
        slow = prefill.engine.prefill

        async def never(asked: Request) -> Handoff:
            await slow(asked)
            await asyncio.Event().wait()
            raise AssertionError

        prefill.engine.prefill = never  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(prefill.handoffs.serve_prefill(request("a"), PREFILL), 0.05)
        await prefill.engine.release_prefill(RequestId("a"))
        prefill.engine.prefill = slow  # type: ignore[method-assign]
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)

        pull = decode.handoffs._mover.pull

        async def stuck(*arguments: object) -> str:
            await asyncio.Event().wait()
            return ""

        decode.handoffs._mover.pull = stuck  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(decode.handoffs.pull(handoff), 0.05)
        await at_rest(decode)
        decode.handoffs._mover.pull = pull  # type: ignore[method-assign]
        assert (await decode.handoffs.pull(handoff)).num_blocks == 5
        await at_rest(prefill, decode)


async def test_an_engine_that_refuses_is_heard() -> None:
    async with side() as prefill:
        with pytest.raises(KvoltError, match="context"):
            await prefill.handoffs.serve_prefill(request(num_tokens=100_000), PREFILL)
        await at_rest(prefill)


async def test_unused_offer_is_dropped() -> None:
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)
        assert not prefill.handoffs.drop(RequestId("another"))
        assert prefill.handoffs.drop(request().request_id)
        await at_rest(prefill)
        assert not prefill.handoffs.drop(request().request_id)
        assert (await decode.handoffs.pull(handoff)).num_blocks == 0
        again = await prefill.handoffs.serve_prefill(request(), PREFILL)
        assert (await decode.handoffs.pull(again)).num_blocks == 5, "the same id can be given again"
        await at_rest(prefill)
        assert not prefill.handoffs.drop(request().request_id)


async def test_what_an_engine_cannot_take_is_declined() -> None:
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)

        async def refuse(*arguments: object) -> KvAllocation:
            raise Unsupported("blocks of several ranks do not travel yet", feature="kv")

        decode.engine.allocate_kv = refuse  # type: ignore[method-assign]
        assert (await decode.handoffs.pull(handoff)).num_blocks == 0
        assert decode.handoffs.stats.failures == {"unsupported": 1}
        await at_rest(prefill)


async def test_a_ticket_that_is_none_for_a_transfer_is_no_error() -> None:
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)
        ticket = msgspec.msgpack.decode(handoff.ticket, type=HandoffTicket)
        nonsense = msgspec.msgpack.encode(replace(ticket, transfer=b"nonsense"))
        assert (await decode.handoffs.pull(replace(handoff, ticket=nonsense))).num_blocks == 0
        assert sum(decode.handoffs.stats.failures.values()) == 1
        await at_rest(decode)


# --- kept until they are asked for

SCARCE = replace(ENGINE, kv_blocks=14)


async def crowd(decode: Side) -> None:
    """Others come and go, more than there is room for."""
    for index in range(4):
        asked = request(f"other{index}", 4 * BLOCK)
        await decode.answer(
            replace(asked, token_ids=tuple(token + 200 * (index + 1) for token in asked.token_ids))
        )


@pytest.mark.parametrize("is_kept", [True, False])
async def test_pulled_blocks_are_kept_for_their_request(is_kept: bool) -> None:
    asked = request()
    expected = await whole(asked)
    async with side() as prefill, side(SCARCE) as decode:
        handoff = await prefill.handoffs.serve_prefill(asked, PREFILL)
        await decode.handoffs.pull(handoff, keep_for=asked.request_id if is_kept else None)
        assert decode.num_used == (5 if is_kept else 0)
        await crowd(decode)
        tokens = await decode.answer(replace(asked, handoff=handoff))
        assert after_first(handoff, tokens) == expected
        assert (decode.cached("r") == 5 * BLOCK) is is_kept
        await at_rest(prefill, decode)


async def test_kept_blocks_are_released_without_a_submit() -> None:
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)
        await decode.handoffs.pull(handoff, keep_for=RequestId("r"))
        assert decode.num_used == 5
        decode.handoffs.release_kept(RequestId("r"))
        await at_rest(prefill, decode)


async def test_offered_blocks_are_not_released_as_kept_ones() -> None:
    """Somebody may be reading it."""
    async with side() as both:
        await both.handoffs.serve_prefill(request(), PREFILL)
        both.handoffs.release_kept(RequestId("r"))
        await asyncio.sleep(0.01)
        assert both.num_used == 6
        both.handoffs.drop(RequestId("r"))
        await at_rest(both)


@pytest.mark.parametrize("when", ["before", "while", "after"])
async def test_who_goes_while_it_settles_leaves_nothing(when: str) -> None:
    async with side() as prefill, side() as decode:
        handoff = await prefill.handoffs.serve_prefill(request(), PREFILL)
        commit_kv = decode.engine.commit_kv
        migrated_request = asyncio.Event()

        async def settle(room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
            if when == "before":
                taking.cancel()
            elif when == "while":
                await migrated_request.wait()
            await commit_kv(room, num_filled, keep_for)
            if when == "after":  # it is done, and whoever waits for it has not run since
                assert decode.num_used == 5
                taking.cancel()

        decode.engine.commit_kv = settle  # type: ignore[method-assign]
        taking = asyncio.ensure_future(decode.handoffs.pull(handoff, keep_for=RequestId("r")))
        if when == "while":
            async with asyncio.timeout(MUST_HAPPEN_S):
                while not decode.handoffs.stats.num_blocks:
                    await asyncio.sleep(0.001)
            taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        migrated_request.set()
        await at_rest(prefill, decode)
        assert await decode.engine.match(request()) == 5 * BLOCK, "it is still cached"
