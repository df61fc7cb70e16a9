"""Workers of a role: one computes prompts for others, another goes on with them, and every way that can end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import (
    ARGUMENTS,
    MODEL,
    NAMESPACE,
    Lab,
    RunningWorker,
    is_empty,
    make_request,
    start_stream,
    until,
)

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.endpoints import was_withdrawn
from kvolt.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    TransferFailed,
    Unavailable,
    Unsupported,
)
from kvolt.core.hashing import SequenceHasher
from kvolt.core.ids import BlockKey, RequestId
from kvolt.core.request import Handoff, Request, Role
from kvolt.engines.contract import EngineSpec, KvAllocation
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.journey.prefill import withdraw_request
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.testing import run_virtual
from kvolt.transfer.memory.slabs import Slab
from kvolt.worker.kv.mover import KvOffer
from kvolt.worker.worker import Worker, stats_of

BLOCK = ARGUMENTS.block_size
PROMPT = 3 * BLOCK + 5
TOKENS = 9


# --- blocks that travel without leaving the process


class Offer:
    def __init__(self, air: Air, ticket: bytes, slab: Slab, blocks: Sequence[int], timeout_s: float) -> None:
        self._air = air
        self.ticket = ticket
        self.slab = slab
        self.blocks = blocks
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(timeout_s, self.cancel)

    def cancel(self) -> None:
        self._timer.cancel()
        self._air.offers.pop(self.ticket, None)
        if not self._over.done():
            self._over.set_result(None)

    def wait_done(self) -> Awaitable[object]:
        return self._over


class Post:
    def __init__(self, air: Air, room: int, note: bytes) -> None:
        self._air = air
        self._room = room
        air.room(room).set_result(note)

    def cancel(self) -> None:
        self._air.rooms.pop(self._room, None)

    async def wait_done(self) -> None:
        """Nobody asks here."""


class Air:
    """What lies between the memories of the workers of one test."""

    def __init__(self, pull_s: float = 0.001) -> None:
        self.pull_s = pull_s
        self.offers: dict[bytes, Offer] = {}
        self.num_offers = 0
        self.num_pulls = 0
        self.rooms: dict[int, asyncio.Future[bytes]] = {}

    def room(self, number: int) -> asyncio.Future[bytes]:
        """Whoever comes first opens it."""
        return self.rooms.setdefault(number, asyncio.get_running_loop().create_future())

    def mover(self, engine: Any) -> Mover:
        [slab] = engine.kv_slabs()
        return Mover(self, slab)


class Mover:
    """A KvMover over it."""

    def __init__(self, air: Air, slab: Slab) -> None:
        self._air = air
        self._slab = slab

    @property
    def block_bytes(self) -> int:
        return self._slab.block_bytes

    def offer(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float, reader_key: bytes = b""
    ) -> KvOffer:
        self._air.num_offers += 1
        ticket = f"offer {self._air.num_offers}".encode()
        offer = self._air.offers[ticket] = Offer(self._air, ticket, self._slab, blocks, timeout_s)
        return offer

    async def pull(
        self,
        ticket: bytes,
        first: int,
        keys: Sequence[BlockKey],
        into: Sequence[int],
        timeout_s: float,
        proof: bytes = b"",
    ) -> str:
        self._air.num_pulls += 1
        await asyncio.sleep(self._air.pull_s)
        offer = self._air.offers.get(ticket)
        if offer is None:
            raise TransferFailed("nothing is offered any more", stage="pull")
        size = self.block_bytes
        for source, target in zip(offer.blocks[first:], into, strict=True):
            self._slab.memory[target * size :][:size] = offer.slab.memory[source * size :][:size]
        offer.cancel()
        return "air"

    def decline(self, ticket: bytes, proof: bytes = b"") -> None:
        if ticket in self._air.offers:
            self._air.offers[ticket].cancel()

    @property
    def address(self) -> str:
        return "in the air"

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> Post:
        return Post(self._air, mailbox, message)

    async def receive(self, address: str, mailbox: int, timeout_s: float) -> bytes:
        assert address == self.address
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._air.room(mailbox))
        except TimeoutError:
            raise DeadlineExceeded("no message", stage="total", after_s=timeout_s) from None
        finally:
            self._air.rooms.pop(mailbox, None)


# --- workers


def engine_of(
    role: Role, arguments: SimArguments = ARGUMENTS, kind: type[SimEngine] = SimEngine
) -> SimEngine:
    return kind(EngineSpec(model=MODEL, role=role), arguments)


async def start(
    lab: Lab, air: Air, role: Role, engine: SimEngine | None = None
) -> tuple[RunningWorker, EndpointClient]:
    running = await lab.worker(role.value, engine or engine_of(role), new_mover=air.mover)
    return running, await lab.client(running, f"caller of {role.value}")


def asked(name: str = "r", **more: int) -> Request:
    request = make_request(name, **{"prompt": PROMPT, "tokens": TOKENS, **more})
    hasher = SequenceHasher(BLOCK)
    hasher.extend(request.token_ids)
    return replace(request, sequence_hashes=tuple(hasher.sequence))


def prompt_of(request: Request) -> Request:
    """Its prompt alone, for somebody else to go on with."""
    return replace(request, prefill_only=True)


async def read(client: EndpointClient, request: Request, deadlines: Deadlines | None = None) -> list[Delta]:
    async with await start_stream(client, request, deadlines) as stream:
        return [delta async for delta in stream]


async def prefill(client: EndpointClient, request: Request) -> Handoff:
    """Computed by a prefill worker, which says one thing."""
    (delta,) = await read(client, prompt_of(request))
    assert delta.handoff is not None
    assert delta == Delta(handoff=delta.handoff, cached_tokens=delta.handoff.cached_tokens)
    return delta.handoff


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def whole(handoff: Handoff, deltas: Sequence[Delta]) -> list[int]:
    assert handoff.first_tokens is not None
    assert deltas[-1].finish is FinishReason.LENGTH
    return [*handoff.first_tokens, *tokens_of(deltas)]


EXPECTED = answer_tokens(asked().token_ids, 1, TOKENS, word_token_ids())


async def at_rest(*workers: RunningWorker, timeout_s: float = 1.0) -> None:
    """Nothing is computed, held or open."""
    await until(
        lambda: all(is_empty(each.engine) and not each.worker._open for each in workers), timeout_s=timeout_s
    )


def outcomes(running: RunningWorker) -> dict[str, int]:
    return {name: count for name, count in running.worker.metrics._outcomes.items() if count}


# --- what a role is for


def test_a_prefill_worker_answers_with_a_handoff() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, air := Air(), Role.PREFILL)
            for name, num_cached in (("one", 0), ("two", 3 * BLOCK)):
                handoff = await prefill(client, asked(name))
                assert handoff.prefill_instance == running.worker._instance
                assert handoff.first_tokens == tuple(EXPECTED[:1])
                assert handoff.cached_tokens == num_cached
                assert len(handoff.block_hashes) == 3
            assert (len(air.offers), outcomes(running)) == (2, {"finished": 2})
            assert not running.worker._open
            assert not is_empty(running.engine), "its blocks wait to be fetched"
            await asyncio.sleep(ARGUMENTS.hold_s + 1)
            await at_rest(running)  # nobody came
            assert not air.offers

    run_virtual(scenario)


def test_decode_worker_continues() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            one, to_prefill = await start(lab, air, Role.PREFILL)
            other, to_decode = await start(lab, air, Role.DECODE)
            handoff = await prefill(to_prefill, asked())
            deltas = await read(to_decode, replace(asked(), handoff=handoff))
            assert whole(handoff, deltas) == EXPECTED
            assert deltas[0].cached_tokens == 3 * BLOCK
            await at_rest(one, other)
            given, taken = stats_of([one.worker, other.worker])
            num_bytes = 3 * one.engine.kv_slabs()[0].block_bytes
            assert (given.num_sent, taken.num_received) == (1, 1)
            assert (taken.by_path, taken.num_bytes) == ({"air": 3}, num_bytes)
            stages, *others = [delta.stages for delta in deltas]
            assert stages is not None
            assert (stages.transfer_bytes, stages.transfer_path) == (num_bytes, "air")
            assert stages.transfer_ms == pytest.approx(air.pull_s * 1e3)
            assert not any(others), "told once"
            assert outcomes(other) == {"finished": 1}
            # What is here by now is not fetched again, and not held for who does not fetch it.
            again = await prefill(to_prefill, asked("again"))
            assert whole(again, await read(to_decode, replace(asked("again"), handoff=again))) == EXPECTED
            assert air.num_pulls == 1
            await at_rest(one, other)

    run_virtual(scenario)


def test_who_decodes_also_takes_whole_requests() -> None:
    """No prefill worker may be left; an aggregated one has no use for a handoff."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            decode, to_decode = await start(lab, air, Role.DECODE)
            assert tokens_of(await read(to_decode, asked())) == EXPECTED
            _, to_prefill = await start(lab, air, Role.PREFILL)
            handoff = await prefill(to_prefill, asked())
            alone, client = await start(lab, air, Role.AGGREGATED)
            assert whole(handoff, await read(client, replace(asked(), handoff=handoff))) == EXPECTED
            assert stats_of([alone.worker]) == []
            assert air.num_pulls == 0
            await at_rest(decode, alone)

    run_virtual(scenario)


def test_blocks_that_do_not_come_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            _, to_prefill = await start(lab, air, Role.PREFILL)
            decode, to_decode = await start(lab, air, Role.DECODE)
            handoff = await prefill(to_prefill, asked())
            for offer in list(air.offers.values()):
                offer.cancel()
            deltas = await read(to_decode, replace(asked(), handoff=handoff))
            assert whole(handoff, deltas) == EXPECTED
            assert deltas[0].cached_tokens == 0
            assert stats_of([decode.worker])[0].failures == {"transfer_failed": 1}
            await at_rest(decode)

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario)


# --- a role that cannot be had


class Unreachable(SimEngine):
    """Its blocks lie on a device."""

    def kv_slabs(self) -> tuple[Slab, ...]:
        raise Unsupported("the KV blocks lie in no memory of the host", feature="kv_slabs")


class Plain(SimEngine):
    """Says that it can do nothing but generate."""

    async def start(self) -> EngineInfo:
        return replace(await super().start(), features=("KvEvents",))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("kind", [Unreachable, Plain, SimEngine])
def test_a_role_that_the_engine_cannot_do_is_refused(role: Role, kind: type[SimEngine]) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            runtime = await lab.runtime("w0")
            new_mover = None if kind is SimEngine else Air().mover
            worker = Worker(runtime, engine_of(role, kind=kind), NAMESPACE, None, new_mover)
            with pytest.raises(ConfigError, match=f"a {role} worker transfers KV") as caught:
                await worker.start()
            assert caught.value.fields["key"] == "role"
            assert "aggregated" in caught.value.fields["remedy"]
            assert ("no memory of the host" in caught.value.message) == (kind is Unreachable)
            assert not await runtime.discovery.get_prefix(f"instances/{NAMESPACE}/"), "nobody may find it"
            await worker.close()

    run_virtual(scenario)


# --- the ends of a handover


def test_a_cancel_while_the_prompt_is_computed_leaves_nothing() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            running, client = await start(lab, air, Role.PREFILL)
            stream = await start_stream(client, prompt_of(asked()))
            await until(lambda: not is_empty(running.engine))
            await stream.aclose()
            await at_rest(running)
            assert (air.offers, outcomes(running)) == ({}, {"cancelled": 1})
            assert not lab.errors
            assert (await prefill(client, asked())).cached_tokens == 0, "the same id again"

    run_virtual(scenario)


def test_a_cancel_while_blocks_come_leaves_nothing() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air(pull_s=5.0)
            prefilled, to_prefill = await start(lab, air, Role.PREFILL)
            running, client = await start(lab, air, Role.DECODE)
            handoff = await prefill(to_prefill, asked())
            stream = await start_stream(client, replace(asked(), handoff=handoff))
            await until(lambda: bool(air.num_pulls))
            assert running.engine.load().kv_used_blocks == 3, "room for what comes"
            await stream.aclose()
            await at_rest(running)
            assert outcomes(running) == {"cancelled": 1}
            assert running.engine.load().waiting == 0
            # Another one may still go on with it; if none does, it expires.
            air.pull_s = 0.0
            again = replace(asked("again"), handoff=handoff)
            assert whole(handoff, await read(client, again)) == EXPECTED
            await at_rest(prefilled, running)
            assert not lab.errors

    run_virtual(scenario)


def test_a_prompt_that_came_is_not_computed_again_however_busy_the_worker_is() -> None:
    """A decode worker with few blocks has others to answer first, which need more than are free."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefilled, to_prefill = await start(lab, air, Role.PREFILL)
            scarce = replace(ARGUMENTS, kv_blocks=12, max_num_seqs=1)
            running, client = await start(lab, air, Role.DECODE, engine_of(Role.DECODE, scarce))
            others = [
                replace(asked(f"other{start}"), token_ids=tuple(range(start, start + PROMPT)))
                for start in (100, 200, 300)
            ]
            async with AsyncExitStack() as stack:
                streams = [await stack.enter_async_context(await start_stream(client, one)) for one in others]
                await until(lambda: running.engine.load().waiting == 2)
                request = replace(asked(), handoff=await prefill(to_prefill, asked()))
                stream = await stack.enter_async_context(await start_stream(client, request))
                await until(lambda: running.engine.load().waiting == 3)
                assert running.engine.load().kv_used_blocks >= 3 + 4, "of the first, and what came"
                for each in streams:
                    assert len(tokens_of([delta async for delta in each])) == TOKENS
                deltas = [delta async for delta in stream]
            assert deltas[0].cached_tokens == 3 * BLOCK
            assert running.engine.load().kv_used_blocks == 0
            await at_rest(prefilled, running)

    run_virtual(scenario)


def test_kept_blocks_of_a_refused_request_are_released() -> None:
    class Refuses(SimEngine):
        def submit(self, request: Request) -> None:
            if request.handoff is not None:
                assert self.load().kv_used_blocks == 3
                raise Overloaded("no more", queue="engine", limit=0)
            super().submit(request)

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefilled, to_prefill = await start(lab, air, Role.PREFILL)
            running, client = await start(lab, air, Role.DECODE, engine_of(Role.DECODE, kind=Refuses))
            handoff = await prefill(to_prefill, asked())
            with pytest.raises(Overloaded):
                await read(client, replace(asked(), handoff=handoff))
            await at_rest(prefilled, running)

    run_virtual(scenario)


def test_a_cancel_while_blocks_settle_leaves_nothing() -> None:
    class Slow(SimEngine):
        async def commit_kv(
            self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None
        ) -> None:
            assert keep_for == "r"
            await asyncio.sleep(0.5)
            await super().commit_kv(room, num_filled, keep_for)

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefilled, to_prefill = await start(lab, air, Role.PREFILL)
            running, client = await start(lab, air, Role.DECODE, engine_of(Role.DECODE, kind=Slow))
            handoff = await prefill(to_prefill, asked())
            stream = await start_stream(client, replace(asked(), handoff=handoff))
            await until(lambda: not air.offers)  # all of it has come
            await stream.aclose()
            await at_rest(prefilled, running, timeout_s=2.0)
            assert outcomes(running) == {"cancelled": 1}
            assert not lab.errors

    run_virtual(scenario)


def test_a_cancel_after_the_handover_aborts_in_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefilled, to_prefill = await start(lab, air, Role.PREFILL)
            running, client = await start(lab, air, Role.DECODE)
            request = asked(tokens=400)
            handoff = await prefill(to_prefill, request)
            async with await start_stream(client, replace(request, handoff=handoff)) as stream:
                await anext(stream)
                assert not is_empty(running.engine)
            await at_rest(prefilled, running)
            assert outcomes(running) == {"cancelled": 1}

    run_virtual(scenario)


def test_the_deadline_ends_a_handover() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air(pull_s=5.0)
            _, to_prefill = await start(lab, air, Role.PREFILL)
            running, client = await start(lab, air, Role.DECODE)
            handoff = await prefill(to_prefill, asked())
            with pytest.raises(DeadlineExceeded):
                await read(client, replace(asked(), handoff=handoff), Deadlines(total_s=1.0))
            await at_rest(running)
            assert air.num_pulls == 1

    run_virtual(scenario)


def test_a_prompt_that_has_not_begun_is_given_back() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            one_by_one = replace(ARGUMENTS, max_num_seqs=1, max_batch_tokens=BLOCK)
            running, client = await start(lab, Air(), Role.PREFILL, engine_of(Role.PREFILL, one_by_one))
            first = await start_stream(client, prompt_of(asked("first")))
            second = await start_stream(client, prompt_of(asked("second")))
            await until(lambda: running.engine.load().waiting == 1)
            (instance,) = client.instances()
            assert not await withdraw_request(client.plane, instance, asked("first").request_id)
            assert await withdraw_request(client.plane, instance, asked("second").request_id)
            with pytest.raises(Unavailable) as caught:
                await anext(second)
            assert was_withdrawn(caught.value)
            assert [delta.handoff is not None async for delta in first] == [True]
            assert outcomes(running) == {"withdrawn": 1, "finished": 1}
            assert not lab.errors

    run_virtual(scenario)


def test_a_second_stream_with_the_same_id_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air(pull_s=1.0)
            _, to_prefill = await start(lab, air, Role.PREFILL)
            _, client = await start(lab, air, Role.DECODE)
            request = replace(asked(), handoff=await prefill(to_prefill, asked()))
            first = await start_stream(client, request)
            await until(lambda: bool(air.num_pulls))
            with pytest.raises(Unavailable, match="still running on this worker"):
                await read(client, request)
            assert len(tokens_of([delta async for delta in first])) == TOKENS - 1
            assert air.num_pulls == 1

    run_virtual(scenario)


# --- errors of the engine


class Failing(SimEngine):
    """With a fault in what is asked of it for handoffs."""

    failure: Exception = RuntimeError("a secret")

    async def prefill(self, request: Request) -> Handoff:
        raise self.failure

    def submit(self, request: Request) -> None:
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Overloaded("the queue is full", queue="engine", limit=1), Overloaded),
        (EngineFailed("out of memory", engine="sim"), EngineFailed),
        (RuntimeError("a secret"), EngineFailed),
    ],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_error_of_the_engine_ends_the_stream(
    role: Role, failure: Exception, told: type[KvoltError], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            handoff = None
            if role is Role.DECODE:
                _, to_prefill = await start(lab, air, Role.PREFILL)
                handoff = await prefill(to_prefill, asked())
            engine = engine_of(role, kind=Failing)
            engine.failure = failure  # type: ignore[attr-defined]
            running, client = await start(lab, air, role, engine)
            with pytest.raises(told) as caught:
                await read(client, replace(asked(), handoff=handoff, prefill_only=role is Role.PREFILL))
            assert "secret" not in caught.value.message
            if isinstance(failure, KvoltError):
                assert caught.value.message == failure.message
            await at_rest(running)
            assert outcomes(running) == {"failed": 1}
            assert not running.task.done(), "the others go on"

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)


def test_a_prompt_that_can_never_run_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Air(), Role.PREFILL)
            with pytest.raises(InvalidRequest, match="context"):
                await read(client, prompt_of(asked(prompt=ARGUMENTS.context_length)))
            await at_rest(running)

    run_virtual(scenario)


class Mortal(SimEngine):
    """Dies when told."""

    def __init__(self, spec: EngineSpec, arguments: SimArguments) -> None:
        super().__init__(spec, arguments)
        self.death = asyncio.Event()

    async def steps(self) -> Any:
        await self.death.wait()
        raise RuntimeError("gone")
        yield StepOutput()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("how", ["dies", "is closed"])
def test_the_end_of_the_engine_ends_handovers(role: Role, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air(pull_s=5.0)
            handoff = None
            if role is Role.DECODE:
                _, to_prefill = await start(lab, air, Role.PREFILL)
                handoff = await prefill(to_prefill, asked())
            engine = engine_of(role, kind=Mortal if how == "dies" else SimEngine)
            running, client = await start(lab, air, role, engine)
            request = replace(asked(), handoff=handoff, prefill_only=role is Role.PREFILL)
            stream = await start_stream(client, request)
            await until(lambda: bool(running.worker._open))
            if isinstance(engine, Mortal):
                engine.death.set()
            else:
                await running.worker.close()
            with pytest.raises(EngineDied):
                await anext(stream)
            assert not running.worker._open
            with pytest.raises(Unavailable):
                await read(client, replace(asked("late"), handoff=handoff))

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)
