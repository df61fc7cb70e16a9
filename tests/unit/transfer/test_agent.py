"""Agents: blocks arrive as they left over every path, or not at all; whatever is over moves no byte any more."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
import pytest
from tests.unit.transfer import tls_lab

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NetworkFault,
    NotFound,
    ProtocolError,
    TransferFailed,
)
from kvolt.transfer.agent import Operation, TransferAgent, TransferOptions
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.layout import IncompatibleLayout, SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.peer import chunks
from kvolt.transfer.reads import read_op as read_op_module
from kvolt.transfer.reads.wire import Address, Hello, decode_ticket, encode_ticket, to_frame
from kvolt.transfer.transfer_handle import OperationState

BLOCK = 4096
NUM = 64
SOON_S = 20.0
PATHS = ["copy", "shm", "tcp", "tls"]
NAMES = {"tls": "tcp"}
"""Of paths that are reported under another name."""


class Side:
    """A process's agent with a slab."""

    def __init__(self, path: str = "shm", seed: int = 0, num_blocks: int = NUM) -> None:
        options = TransferOptions(shared_memory=path not in ("tcp", "tls"))
        self.agent = TransferAgent(options, credentials=tls_lab.of_worker() if path == "tls" else None)
        self.slab = Slab.shared(num_blocks, BLOCK)
        self.rows = np.frombuffer(self.slab.memory, dtype=np.uint8).reshape(num_blocks, BLOCK)
        if seed:
            self.rows[:] = np.random.default_rng(seed).integers(0, 256, self.rows.shape)


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Side]:
    path = request.getfixturevalue("path") if "path" in request.fixturenames else "shm"
    side = Side("tls" if path == "tls" else "shm", seed=1)
    yield side
    side.agent.close()


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def target(source: Side, path: str) -> AsyncIterator[Side]:
    """Where `path` leads to from the source."""
    side = Side(path)
    if path == "copy":
        side.agent.close()
        side.agent = source.agent
    yield side
    if path != "copy":
        side.agent.close()


async def test_blocks_are_read(source: Side, target: Side, path: str) -> None:
    offer = source.agent.offer(source.slab, [3, 9, 4, 60], SOON_S)
    read = target.agent.read(offer.ticket, target.slab, [0, 5, 1, 2], SOON_S)
    assert await read == NAMES.get(path, path)
    await offer
    assert (read.state, offer.state) == (OperationState.COMPLETE, OperationState.COMPLETE)
    assert (target.rows[[0, 5, 1, 2]] == source.rows[[3, 9, 4, 60]]).all()
    assert not target.rows[[3, 4, 6]].any()


async def test_many_at_once(source: Side, target: Side) -> None:
    offers = [source.agent.offer(source.slab, [block], SOON_S) for block in range(NUM)]
    reads = [
        target.agent.read(each.ticket, target.slab, [NUM - 1 - block], SOON_S)
        for block, each in enumerate(offers)
    ]
    await asyncio.gather(*reads, *offers)
    assert (target.rows == source.rows[::-1]).all()


async def test_some_of_a_ticket(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, range(10, 20), SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S, positions=[7, 0])
    await offer
    assert (target.rows[[1, 2]] == source.rows[[17, 10]]).all()
    offer = source.agent.offer(source.slab, range(10, 20), SOON_S)
    with pytest.raises(InvalidRequest, match="outside the 10"):
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S, positions=[10])
    assert offer.state is OperationState.IN_PROGRESS


async def test_unchecked(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    await target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S, is_checked=False)
    assert (target.rows == source.rows).all()


async def test_other_names_are_other_checksums(source: Side, target: Side, path: str) -> None:
    """Seeds are made of what a block is called: bytes that came for another name are as wrong as a flipped bit."""
    seeds = np.arange(3, dtype=np.uint64)
    offer = source.agent.offer(source.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    await target.agent.read(offer.ticket, target.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    if path == "copy":
        return  # the same process: nothing has left
    offer = source.agent.offer(source.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    with pytest.raises(TransferFailed, match="block 2") as raised:
        wrong = np.array([0, 1, 7], dtype=np.uint64).tobytes()
        await target.agent.read(offer.ticket, target.slab, [1, 2, 3], SOON_S, seeds=wrong)
    assert raised.value.fields == {"path": NAMES.get(path, path), "reason": "checksum"}
    # The offer is still open, so it can be read again.
    await target.agent.read(offer.ticket, target.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    await offer


async def test_what_was_read_is_not_offered_any_more(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    await offer
    with pytest.raises(NotFound, match="does not exist"):
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S)


async def test_an_offer_is_taken_back(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], SOON_S)
    offer.cancel()
    with pytest.raises(Cancelled):
        await offer
    assert offer.state is OperationState.CANCELLED
    with pytest.raises(NotFound):
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S)


async def test_an_unused_offer_expires(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], 0.05)
    with pytest.raises(DeadlineExceeded):
        await offer
    assert offer.state is OperationState.ERRORED
    with pytest.raises(NotFound):
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S)


async def test_a_read_that_is_cancelled_has_stopped(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its blocks; the offer stays for others."""
    for module in (read_op_module, chunks):
        monkeypatch.setattr(module, "_STEP_BYTES", 1)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", BLOCK)
    first_part = {name: getattr(read_op_module.ReadOp, name) for name in ("step", "on_chunk")}

    is_asked = threading.Event()

    def then_cancel(name: str) -> Callable[..., object]:
        def call(self: read_op_module.ReadOp, *arguments: object) -> object:
            done = first_part[name](self, *arguments)
            assert is_asked.wait(SOON_S)
            read.cancel()
            return done

        return call

    for name in first_part:
        monkeypatch.setattr(read_op_module.ReadOp, name, then_cancel(name))
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    read = target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S)
    is_asked.set()
    with pytest.raises(Cancelled):
        await read
    assert read.state is OperationState.CANCELLED
    num_came = int(target.rows.any(axis=1).sum())
    assert 0 < num_came < NUM / 2
    monkeypatch.undo()
    before = target.rows.copy()
    await target.agent.read(offer.ticket, target.slab, [0], SOON_S, positions=[5])
    assert (target.rows[0] == source.rows[5]).all()
    assert (target.rows[1:] == before[1:]).all()


async def test_who_awaits_may_go(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], SOON_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(_await(offer), 0.01)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    assert offer.result(SOON_S) == ""


async def _await(operation: Operation) -> str:
    return await operation


@pytest.mark.parametrize("path", ["shm", "tcp", "tls"], indirect=True)
async def test_a_peer_that_goes(source: Side, path: str) -> None:
    other = Side(path)
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await other.agent.read(offer.ticket, other.slab, [1], SOON_S)
    late = source.agent.offer(source.slab, [2], SOON_S)
    other.agent.close()
    late.cancel()
    with pytest.raises(Cancelled):
        await late
    reader = Side(path)
    try:
        offer = source.agent.offer(source.slab, [3], SOON_S)
        source.agent.close()
        with pytest.raises(NetworkFault):
            await reader.agent.read(offer.ticket, reader.slab, [3], SOON_S)
        with pytest.raises(Cancelled):
            await offer
        with pytest.raises(Cancelled, match="closed"):
            await source.agent.offer(source.slab, [3], SOON_S)
    finally:
        reader.agent.close()


async def test_a_source_that_is_changed_too_early_is_found(
    source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums are those of what it was; what is read is not that."""
    target = Side()
    copy_checked = block_bytes.copy_checked

    def changed(*arguments: object) -> None:
        source.rows[2] ^= 1
        copy_checked(*arguments)  # type: ignore[arg-type]
        source.rows[2] ^= 1

    monkeypatch.setattr(block_bytes, "copy_checked", changed)
    offer = source.agent.offer(source.slab, [1, 2], SOON_S)
    with pytest.raises(TransferFailed, match="block 1"):
        await target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S)
    target.agent.close()


async def test_a_peer_cannot_write_to_mapped_memory(source: Side) -> None:
    target = Side()
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    (link,) = target.agent._hub._links.values()
    ((_, mapped),) = link._memory._shared.values()
    assert memoryview(mapped).readonly
    target.agent.close()


async def test_ranks_that_share_heads_differently(source: Side, path: str) -> None:
    """Two ranks of a source fill the blocks of one."""
    model = KvLayout(
        name="block-layer-kv-head-token",
        dtype="float32",
        num_layers=2,
        num_kv_heads=4,
        head_dim=8,
        block_size=4,
        block_bytes=2 * 2 * 4 * 4 * 8 * 4,
    )
    whole = np.random.default_rng(2).random((3, 2, 2, 4, 4, 8), dtype=np.float32)
    target = Side(path).agent
    try:
        into = Slab.shared(3, model.block_bytes, SlabLayout.of_rank(model))
        reads = []
        for rank in range(2):
            layout = SlabLayout.of_rank(model, 2, rank)
            slab = Slab.shared(3, layout.block.block_bytes, layout)
            slab.memory[:] = np.ascontiguousarray(whole[:, :, :, 2 * rank : 2 * rank + 2]).tobytes()
            offer = source.agent.offer(slab, [0, 1, 2], SOON_S)
            reads.append(
                (target if path != "copy" else source.agent).read(offer.ticket, into, [2, 1, 0], SOON_S)
            )
        await asyncio.gather(*reads)
        got = np.frombuffer(into.memory, dtype=np.float32).reshape(whole.shape)
        assert (got[::-1] == whole).all()
        other = SlabLayout.of_rank(KvLayout(**{**_fields(model), "dtype": "float16", "block_bytes": 1024}))
        with pytest.raises(IncompatibleLayout, match="dtype"):
            target.read(offer.ticket, Slab.shared(3, 1024, other), [0, 1, 2], SOON_S)
    finally:
        target.close()


def _fields(layout: KvLayout) -> dict[str, object]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


async def test_what_is_wrong_is_refused_at_once(source: Side) -> None:
    agent, slab = source.agent, source.slab
    offer = agent.offer(slab, [1, 2], SOON_S)
    with pytest.raises(InvalidRequest, match="out of range"):
        agent.offer(slab, [NUM], SOON_S)
    with pytest.raises(InvalidRequest, match="duplicate"):
        agent.offer(slab, [1, 1], SOON_S)
    with pytest.raises(InvalidRequest, match="empty"):
        agent.offer(slab, [], SOON_S)
    with pytest.raises(InvalidRequest, match="one-dimensional"):
        agent.offer(slab, np.zeros((2, 2), dtype=np.int64), SOON_S)
    with pytest.raises(InvalidRequest, match="seed"):
        agent.offer(slab, [1], SOON_S, seeds=b"1")
    with pytest.raises(InvalidRequest, match="seed"):
        agent.read(offer.ticket, slab, [4, 5], SOON_S, seeds=b"1")
    with pytest.raises(InvalidRequest, match="2 source blocks for 1"):
        agent.read(offer.ticket, slab, [4], SOON_S)
    with pytest.raises(InvalidRequest, match="bytes"):
        agent.read(offer.ticket, Slab.shared(2, 100), [0, 1], SOON_S)
    with pytest.raises(ProtocolError, match="ticket"):
        agent.read(b"no ticket", slab, [4], SOON_S)
    with pytest.raises(InvalidRequest, match="cannot hold a block"):
        Slab(memoryview(bytearray(10)), 11)


async def test_an_unreachable_peer(source: Side) -> None:
    ticket = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        gone = Address("remove_session", "127.0.0.1", port, "kvolt-nobody")
        lost = encode_ticket(type(ticket)(gone, b"1", ticket.slab, 1))
        with pytest.raises(NetworkFault, match="no connection"):
            await source.agent.read(lost, source.slab, [1], SOON_S)
    replaced = Address("other", source.agent.address.host, source.agent.address.port, "")
    with pytest.raises(NetworkFault, match="another agent"):
        other = encode_ticket(type(ticket)(replaced, b"1", ticket.slab, 1))
        await source.agent.read(other, source.slab, [1], SOON_S)


async def test_a_peer_that_never_answers(source: Side) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        ticket = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket)
        address = Address("silent", "127.0.0.1", silent.getsockname()[1], "")
        asked = encode_ticket(type(ticket)(address, b"1", ticket.slab, 1))
        with pytest.raises(DeadlineExceeded):
            await source.agent.read(asked, source.slab, [1], 0.1)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"\x04\x00\x00\x00abcd",
        to_frame(Hello("x", "frames", version=99)),
    ],
    ids=["a frame too large", "no message", "another version"],
)
async def test_a_peer_that_talks_nonsense_is_let_go(source: Side, said: bytes) -> None:
    reader, writer = await asyncio.open_connection(source.agent.address.host, source.agent.address.port)
    writer.write(said)
    assert await asyncio.wait_for(reader.read(), SOON_S) == b""
    writer.close()
    target = Side()
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    target.agent.close()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            TransferAgent(TransferOptions(port=taken.getsockname()[1]))


def test_nothing_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    one, two = Side(seed=1), Side()
    offer = one.agent.offer(one.slab, range(NUM), SOON_S)
    two.agent.read(offer.ticket, two.slab, range(NUM), SOON_S).result(SOON_S)
    for side in (one, two):
        side.agent.close()
        del side.rows
        side.slab.close()
        side.slab.close()
    assert len(os.listdir("/proc/self/fd")) <= before
