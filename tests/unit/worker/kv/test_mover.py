"""AgentMover: blocks whose heads are shared by several ranks, moved between agents. Compared with sliced tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvolt.core.block_key import BLOCK_KEY_BYTES, KvLayout
from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, ProtocolError
from kvolt.core.ids import BlockKey
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.layout import IncompatibleLayout, MissingHeads, SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.worker.kv.mover import AgentMover

NUM_BLOCKS = 8
HEADS = 4
WAIT_S = 10.0
KEYS = [BlockKey(bytes([number]) * BLOCK_KEY_BYTES) for number in range(1, 7)]
SOURCE, TARGET = [5, 1, 6, 0], [2, 7, 3, 4]
"""Numbers of blocks there and here."""

Tensor = npt.NDArray[np.float32]


def model(num_kv_heads: int) -> KvLayout:
    return KvLayout(
        name="block-layer-kv-head-token",
        dtype="float32",
        num_layers=3,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        block_size=2,
        block_bytes=3 * 2 * num_kv_heads * 2 * 4 * 4,
    )


@dataclass
class Side:
    """An engine's memory, and what moves it."""

    agent: TransferAgent
    slabs: tuple[Slab, ...]
    mover: AgentMover

    def tensor(self, rank: int) -> Tensor:
        """A rank's own: block, layer, kv, head, token and value."""
        layout = self.slabs[rank].layout
        assert layout is not None
        flat = np.frombuffer(self.slabs[rank].memory, dtype=np.float32)
        return flat.reshape(NUM_BLOCKS, 3, 2, layout.block.num_kv_heads, 2, 4)

    def heads(self, rank: int) -> range:
        layout = self.slabs[rank].layout
        assert layout is not None
        return layout.heads

    def fill(self, whole: Tensor) -> None:
        for rank in range(len(self.slabs)):
            self.tensor(rank)[:] = whole[:, :, :, list(self.heads(rank))]


class Sides:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, degree: int, num_heads: int = HEADS, near: bool = True) -> Side:
        agent = TransferAgent(TransferOptions(shared_memory=near))
        slabs = []
        for rank in range(degree):
            layout = SlabLayout.of_rank(model(num_heads), degree, rank)
            slabs.append(Slab.shared(NUM_BLOCKS, layout.block.block_bytes, layout))
        self._stack.callback(agent.close)
        return Side(agent, tuple(slabs), AgentMover(agent, slabs))


@pytest.fixture
def sides() -> Iterator[Sides]:
    with ExitStack() as stack:
        yield Sides(stack)


def whole_blocks(num_heads: int = HEADS) -> Tensor:
    shape = (NUM_BLOCKS, 3, 2, num_heads, 2, 4)
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def assert_moved(target: Side, whole: Tensor, source: Sequence[int], into: Sequence[int]) -> None:
    """These blocks, every head of them, and nothing else."""
    for rank in range(len(target.slabs)):
        wanted = np.zeros_like(target.tensor(rank))
        wanted[into] = whole[source][:, :, :, list(target.heads(rank))]
        np.testing.assert_array_equal(target.tensor(rank), wanted)


DEGREES = [(1, 1, 4), (2, 1, 4), (1, 2, 4), (2, 2, 4), (4, 2, 4), (1, 4, 4), (4, 1, 2), (2, 4, 2), (4, 4, 1)]
"""Ranks there, ranks here, heads: with more ranks than heads some of them are replicas."""


@pytest.mark.parametrize("near", [True, False], ids=["shm", "tcp"])
@pytest.mark.parametrize(("there", "here", "num_heads"), DEGREES)
async def test_every_rank_gets_its_heads(
    sides: Sides, there: int, here: int, num_heads: int, near: bool
) -> None:
    source, target = sides(there, num_heads), sides(here, num_heads, near)
    whole = whole_blocks(num_heads)
    source.fill(whole)
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    path = await target.mover.pull(offer.ticket, 1, KEYS[:4], TARGET[1:], WAIT_S)
    assert path == ("shm" if near else "tcp")
    assert_moved(target, whole, SOURCE[1:], TARGET[1:])
    async with asyncio.timeout(WAIT_S):
        await offer.wait_done()  # also that of a replica that nobody needed
    assert target.mover.block_bytes == sum(slab.block_bytes for slab in target.slabs)


async def test_an_offer_is_over_when_the_last_rank_has_read_it(sides: Sides) -> None:
    source, target = sides(1), sides(2)
    source.fill(whole_blocks())
    offering = source.agent.offer(source.slabs[0], SOURCE, WAIT_S)
    for slab, is_last in zip(target.slabs, (False, True), strict=True):
        assert not offering.state.is_done
        await target.agent.read(offering.ticket, slab, TARGET, WAIT_S, is_last=is_last)
    assert await offering == ""
    assert_moved(target, whole_blocks(), SOURCE, TARGET)


async def test_who_stops_in_the_middle_leaves_it_to_others(sides: Sides) -> None:
    """Cancelled when one of two ranks has its heads: another can have all of them."""
    source, target, other = sides(1), sides(2), sides(2)
    source.fill(whole_blocks())
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    read, is_first_over = target.agent.read, asyncio.Event()

    def stuck(*arguments: object, is_last: bool, **more: object) -> object:
        if is_last:
            is_first_over.set()
            return Stuck()
        return read(*arguments, is_last=is_last, **more)  # type: ignore[arg-type]

    target.agent.read = stuck  # type: ignore[method-assign, assignment]
    task = asyncio.ensure_future(target.mover.pull(offer.ticket, 0, KEYS[:4], TARGET, WAIT_S))
    await asyncio.wait_for(is_first_over.wait(), WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await other.mover.pull(offer.ticket, 0, KEYS[:4], TARGET, WAIT_S)
    assert_moved(other, whole_blocks(), SOURCE, TARGET)


class Stuck:
    """A read of which nothing comes until it is cancelled."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def __await__(self) -> Iterator[object]:
        return asyncio.Event().wait().__await__()  # type: ignore[return-value]

    def cancel(self) -> None:
        self._over.set()

    async def wait_done(self) -> None:
        await self._over.wait()


async def test_a_rank_whose_blocks_do_not_come_is_a_miss(sides: Sides) -> None:
    source, target = sides(2), sides(1)
    source.fill(whole_blocks())
    for lost in range(2):
        offers = [
            source.agent.offer(slab, SOURCE, WAIT_S, seeds=b"".join(key[:8] for key in KEYS[:4]))
            for slab in source.slabs
        ]
        offers[lost].cancel()
        await offers[lost].wait_done()
        ticket = msgspec.msgpack.encode([offer.ticket for offer in offers])
        with pytest.raises(KvoltError, match="the offer does not exist or has ended"):
            await target.mover.pull(ticket, 0, KEYS[:4], TARGET, WAIT_S)
        target.mover.decline(ticket)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(offer.wait_done() for offer in offers))


async def test_blocks_under_another_name_are_refused(sides: Sides) -> None:
    source, target = sides(2), sides(1)
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    with pytest.raises(KvoltError, match="checksum"):
        await target.mover.pull(offer.ticket, 0, KEYS[1:5], TARGET, WAIT_S)


async def test_a_rank_that_is_missing_is_named_and_nothing_is_read(sides: Sides) -> None:
    source, target = sides(2), sides(1)
    source.fill(whole_blocks())
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    first, _ = msgspec.msgpack.decode(offer.ticket)
    for tickets in ([first], [first, first]):
        with pytest.raises(MissingHeads, match="KV heads 2-3"):
            await target.mover.pull(msgspec.msgpack.encode(tickets), 0, KEYS[:4], TARGET, WAIT_S)
    assert not any(target.slabs[0].memory)


async def test_ranks_that_cannot_share_heads_are_refused_with_the_remedy(sides: Sides) -> None:
    source, target = sides(3, 6), sides(2, 6)
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    with pytest.raises(IncompatibleLayout, match="choose degrees such that one divides the other"):
        await target.mover.pull(offer.ticket, 0, KEYS[:4], TARGET, WAIT_S)
    target.mover.decline(offer.ticket)
    async with asyncio.timeout(WAIT_S):
        await offer.wait_done()


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([b""]),
        msgspec.msgpack.encode([b"x"] * 2000),
    ],
    ids=["empty", "garbage", "no rank", "no ticket", "too many"],
)
async def test_what_is_no_ticket_is_refused_and_not_declined(sides: Sides, ticket: bytes) -> None:
    target = sides(1)
    with pytest.raises(ProtocolError):
        await target.mover.pull(ticket, 0, KEYS[:4], TARGET, WAIT_S)
    target.mover.decline(ticket)


async def test_blocks_of_no_kv_are_refused(sides: Sides) -> None:
    source, target = sides(1), sides(1)
    plain = Slab.shared(NUM_BLOCKS, source.slabs[0].block_bytes)
    ticket = source.agent.offer(plain, SOURCE, WAIT_S).ticket
    with pytest.raises(ProtocolError, match="not KV"):
        await target.mover.pull(msgspec.msgpack.encode([ticket]), 0, KEYS[:4], TARGET, WAIT_S)


async def test_an_offer_is_for_all_ranks_or_for_none(sides: Sides) -> None:
    source = sides(2)
    with pytest.raises(InvalidRequest):
        source.mover.offer([NUM_BLOCKS], KEYS[:1], WAIT_S)
    made = []
    offer_one = source.agent.offer

    def second_fails(slab: Slab, *arguments: object, **more: object) -> object:
        if slab is source.slabs[1]:
            raise InvalidRequest("no such block", param="blocks")
        made.append(offer_one(slab, *arguments, **more))  # type: ignore[arg-type]
        return made[-1]

    source.agent.offer = second_fails  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidRequest, match="no such block"):
        source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(made[0], WAIT_S)


async def test_an_offer_that_is_cancelled_or_expires_is_over_on_all_ranks(sides: Sides) -> None:
    source = sides(2)
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    offer.cancel()
    async with asyncio.timeout(WAIT_S):
        await offer.wait_done()
        await source.mover.offer(SOURCE, KEYS[:4], 0.01).wait_done()
    target = sides(1)
    with pytest.raises(KvoltError):
        await target.mover.pull(offer.ticket, 0, KEYS[:4], TARGET, WAIT_S)


async def test_all_reads_together_have_the_time_of_one(sides: Sides) -> None:
    """Of two ranks here that read one there, the second has what the first has left."""
    source, target = sides(1), sides(2)
    offer = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    read, given = target.agent.read, []

    def late(ticket: bytes, slab: Slab, blocks: Sequence[int], timeout_s: float, **more: object) -> object:
        given.append(timeout_s)
        return read(ticket, slab, blocks, timeout_s, **more)  # type: ignore[arg-type]

    target.agent.read = late  # type: ignore[method-assign, assignment]
    await target.mover.pull(offer.ticket, 0, KEYS[:4], TARGET, WAIT_S)
    assert WAIT_S >= given[0] > given[1] > 0
    again = source.mover.offer(SOURCE, KEYS[:4], WAIT_S)
    with pytest.raises(DeadlineExceeded):
        await target.mover.pull(again.ticket, 0, KEYS[:4], TARGET, 0.0)
