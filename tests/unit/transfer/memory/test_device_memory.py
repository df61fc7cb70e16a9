"""Blocks of devices between agents: by the devices themselves where they can, by way of the host where not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tests.unit.transfer.device_lab import WITH_GPU, FakeDevice

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import Cancelled, InvalidRequest, KvoltError, TransferFailed, Unsupported
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.paths.capabilities import MachineFacts
from kvolt.transfer.peer import chunks
from kvolt.transfer.reads import read_op as reading
from kvolt.transfer.reads.read_op import ReadOp
from kvolt.transfer.reads.read_request import new_read_request
from kvolt.transfer.reads.wire import decode_ticket

BLOCK, NUM, SOON_S = 4096, 32, 20.0
SOME, PLACES = [3, 9, 4, 30], [0, 5, 1, 2]


@pytest.fixture
def source() -> Iterator[TransferAgent]:
    agent = TransferAgent(facts=WITH_GPU)
    yield agent
    agent.close()


@pytest.fixture
def target() -> Iterator[TransferAgent]:
    agent = TransferAgent(facts=WITH_GPU)
    yield agent
    agent.close()


async def moved(source: TransferAgent, of: Slab, target: TransferAgent, into: Slab) -> str:
    offer = source.offer(of, SOME, SOON_S, seeds=bytes(range(8 * len(SOME))))
    path = await target.read(offer.ticket, into, PLACES, SOON_S, seeds=bytes(range(8 * len(SOME))))
    await offer
    return path


def host_rows(slab: Slab) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(slab.memory, dtype=np.uint8).reshape(-1, BLOCK)


async def test_a_device_reads_another_process_s_memory_itself(
    source: TransferAgent, target: TransferAgent
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    assert await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK)) == "cuda-ipc"
    assert (ours.rows(BLOCK)[PLACES] == theirs.rows(BLOCK)[SOME]).all()


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_where_it_cannot_blocks_go_by_way_of_the_host(
    source: TransferAgent, shared_memory: bool
) -> None:
    target = TransferAgent(TransferOptions(shared_memory=shared_memory), facts=WITH_GPU)
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    of, ours.opens = theirs.slab(BLOCK), False
    try:
        for _ in range(2):
            ours.bytes[:] = 0
            assert await moved(source, of, target, ours.slab(BLOCK)) == "tcp"
            assert (ours.rows(BLOCK)[PLACES] == theirs.rows(BLOCK)[SOME]).all()
    finally:
        target.close()
    assert ours.num_opened == int(shared_memory), "what cannot be opened once is not tried again"


async def test_memory_without_a_handle_goes_by_way_of_the_host(
    source: TransferAgent, target: TransferAgent
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1, is_shared=False), FakeDevice(NUM * BLOCK, 2)
    assert await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK)) == "tcp"
    assert (ours.rows(BLOCK)[PLACES] == theirs.rows(BLOCK)[SOME]).all()


async def test_a_peer_that_has_no_device_is_not_asked_for_one(target: TransferAgent) -> None:
    source = TransferAgent(facts=MachineFacts())
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    try:
        assert await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK)) == "tcp"
    finally:
        source.close()
    assert not ours.num_opened


async def test_from_the_host_to_a_device_and_back(source: TransferAgent, target: TransferAgent) -> None:
    host, device = Slab.shared(NUM, BLOCK), FakeDevice(NUM * BLOCK, 2)
    host_rows(host)[:] = np.random.default_rng(5).integers(0, 256, (NUM, BLOCK))
    assert await moved(source, host, target, device.slab(BLOCK)) == "shm"
    assert (device.rows(BLOCK)[PLACES] == host_rows(host)[SOME]).all()
    assert await moved(source, device.slab(BLOCK), target, host) == "tcp"
    assert (host_rows(host)[PLACES] == device.rows(BLOCK)[SOME]).all()


async def test_within_one_process(source: TransferAgent) -> None:
    host, device, other = Slab.shared(NUM, BLOCK), FakeDevice(NUM * BLOCK, 2), FakeDevice(NUM * BLOCK, 3)
    assert await moved(source, device.slab(BLOCK), source, host) == "copy"
    assert (host_rows(host)[PLACES] == device.rows(BLOCK)[SOME]).all()
    assert await moved(source, device.slab(BLOCK), source, other.slab(BLOCK)) == "copy"
    assert (other.rows(BLOCK)[PLACES] == device.rows(BLOCK)[SOME]).all()


@pytest.mark.parametrize("opens", [True, False])
async def test_what_arrives_otherwise_than_it_left_is_an_error(
    source: TransferAgent, target: TransferAgent, opens: bool
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    ours.opens, ours.breaks = opens, True
    with pytest.raises(TransferFailed, match="checksum"):
        await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK))


async def test_ranks_that_share_heads_differently(source: TransferAgent, target: TransferAgent) -> None:
    """Pieces of blocks: a device of the first of two ranks takes its half of each block."""
    model = KvLayout(
        name="block-layer-kv-head-token",
        dtype="float16",
        num_layers=2,
        num_kv_heads=4,
        head_dim=8,
        block_size=4,
        block_bytes=2 * 2 * 4 * 4 * 8 * 2,
    )
    whole, half = SlabLayout.of_rank(model), SlabLayout.of_rank(model, 2, 0)
    theirs, ours = (
        FakeDevice(NUM * model.block_bytes, 1),
        FakeDevice(NUM * half.block.block_bytes, 2),
    )
    offer = source.offer(Slab.on_device(theirs, model.block_bytes, whole), SOME, SOON_S)
    into = Slab.on_device(ours, half.block.block_bytes, half)
    assert await target.read(offer.ticket, into, PLACES, SOON_S) == "cuda-ipc"
    heads = theirs.bytes.reshape(NUM, 2, 2, 4, 4, 8, 2)[SOME][:, :, :, :2]
    assert (ours.bytes.reshape(NUM, 2, 2, 2, 4, 8, 2)[PLACES] == heads).all()


def test_a_memory_that_holds_no_block() -> None:
    with pytest.raises(InvalidRequest, match="cannot hold a block"):
        FakeDevice(16).slab(32)


def test_blocks_that_no_device_moves() -> None:
    with pytest.raises(InvalidRequest, match="multiple of 8"):
        FakeDevice(64).slab(12)


async def test_many_blocks_go_in_parts(
    source: TransferAgent, target: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a device's own path and of chunks over TCP, whose memory in between is used again."""
    monkeypatch.setattr(device_memory, "DEVICE_STEP_BYTES", 3 * BLOCK)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 5 * BLOCK)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 5 * BLOCK)
    theirs, order = FakeDevice(NUM * BLOCK, 1), np.random.default_rng(3).permutation(NUM)
    for opens in (True, False):
        ours = FakeDevice(NUM * BLOCK, 2)
        ours.opens = opens
        offer = source.offer(theirs.slab(BLOCK), order, SOON_S)
        path = await target.read(offer.ticket, ours.slab(BLOCK), range(NUM), SOON_S)
        assert path == ("cuda-ipc" if opens else "tcp")
        assert (ours.rows(BLOCK) == theirs.rows(BLOCK)[order]).all()


async def test_a_memory_is_opened_once_and_given_back_with_the_link(
    source: TransferAgent, target: TransferAgent
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    of, into = theirs.slab(BLOCK), ours.slab(BLOCK)
    for _ in range(3):
        assert await moved(source, of, target, into) == "cuda-ipc"
    assert (ours.num_opened, theirs.num_closed) == (1, 0)
    target.close()
    assert theirs.num_closed == 1


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("whose", ["source", "target"])
async def test_a_device_that_fails_fails_its_reads_and_no_others(
    source: TransferAgent, target: TransferAgent, opens: bool, whose: str
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    ours.opens = opens
    (theirs if whose == "source" else ours).fails = True
    with pytest.raises(TransferFailed, match="out of memory"):
        await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK))
    theirs.fails = ours.fails = False
    await moved(source, theirs.slab(BLOCK), target, ours.slab(BLOCK))
    assert (ours.rows(BLOCK)[PLACES] == theirs.rows(BLOCK)[SOME]).all()


async def test_a_memory_that_fails_to_open_is_tried_again(
    source: TransferAgent, target: TransferAgent
) -> None:
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    of, ours.open_fails = theirs.slab(BLOCK), True
    with pytest.raises(TransferFailed, match="out of memory"):
        await moved(source, of, target, ours.slab(BLOCK))
    ours.open_fails = False
    assert await moved(source, of, target, ours.slab(BLOCK)) == "cuda-ipc"


async def test_a_read_that_is_stopped_writes_no_more(
    source: TransferAgent, target: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "DEVICE_STEP_BYTES", BLOCK)
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    offer = source.offer(theirs.slab(BLOCK), range(NUM), SOON_S)
    is_known = threading.Event()

    def stop() -> None:
        assert is_known.wait(SOON_S)
        read.cancel()

    ours.on_move = stop
    read = target.read(offer.ticket, ours.slab(BLOCK), range(NUM), SOON_S)
    is_known.set()
    with pytest.raises(Cancelled):
        await read
    now = ours.bytes.copy()
    assert not (now == theirs.bytes).all()
    offer.cancel()
    await offer.wait_done()
    assert (ours.bytes == now).all()


async def test_device_handles_are_not_sent_over_tcp(source: TransferAgent) -> None:
    """It would let him write."""
    target = TransferAgent(TransferOptions(shared_memory=False), facts=WITH_GPU)
    theirs, ours = FakeDevice(NUM * BLOCK, 1), FakeDevice(NUM * BLOCK, 2)
    offer = source.offer(theirs.slab(BLOCK), SOME, SOON_S)
    wanted = new_read_request(decode_ticket(offer.ticket), ours.slab(BLOCK), np.array(PLACES))
    ended: asyncio.Queue[KvoltError | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    asked = ReadOp(wanted, lambda error: loop.call_soon_threadsafe(ended.put_nowait, error))
    asked.forced_path = "cuda-ipc"
    hub = target._hub
    hub.progress.call_soon(lambda: hub.read(asked, hub.progress.now() + SOON_S))
    try:
        error = await asyncio.wait_for(ended.get(), SOON_S)
        assert isinstance(error, Unsupported)
        assert not ours.num_opened
    finally:
        target.close()
        offer.cancel()


@pytest.mark.parametrize(("kind", "device"), [("device", None), ("shared", "GPU-0"), ("device", "x" * 129)])
def test_what_a_peer_tells_of_a_slab_is_held_against_its_kind(kind: str, device: str | None) -> None:
    told = {"number": 0, "kind": kind, "block_bytes": 64, "num_blocks": 1, "device": device}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(told, SlabInfo)
