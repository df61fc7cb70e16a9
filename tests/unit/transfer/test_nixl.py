"""NIXL, the real one: blocks arrive as they left, or not at all; nothing spins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.transfer.nixl_lab import (
    BLOCK,
    NUM,
    SOON_S,
    Side,
    mute,
    new_sides,
    private_slab,
    under_way,
    until,
)

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import (
    NotFound,
    ProtocolError,
    TransferFailed,
)
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.nixl import read as nixl_read
from kvolt.transfer.nixl.memory import unit_bytes_of, units_of
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.paths import nixl_library
from kvolt.transfer.peer import checksum_task as summing
from kvolt.transfer.peer import serving
from kvolt.transfer.reads import read_op as read_op_module
from kvolt.transfer.reads import wire

if nixl_library.find_package() is None:
    pytest.skip(f"NIXL is not installed: {nixl_library.REMEDY}", allow_module_level=True)


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    with new_sides() as new:
        yield new


@pytest.fixture
def source(sides: Callable[..., Side]) -> Side:
    return sides(seed=1)


@pytest.fixture
def target(sides: Callable[..., Side]) -> Side:
    return sides()


async def test_blocks_are_read(source: Side, target: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts, from any place to any other."""
    monkeypatch.setattr(nixl_read, "STEP_BYTES", 5 * BLOCK)
    there, here = (np.random.default_rng(seed).permutation(NUM) for seed in (2, 3))
    offer = source.agent.offer(source.slab, there, SOON_S)
    read = target.agent.read(offer.ticket, target.slab, here, SOON_S)
    assert await read == "nixl"
    await offer
    assert (target.rows[here] == source.rows[there]).all()


async def test_some_blocks_and_no_others(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, range(10, 20), SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S, positions=[7, 0], is_checked=False)
    assert (target.rows[[1, 2]] == source.rows[[17, 10]]).all()
    assert not np.delete(target.rows, [1, 2], axis=0).any()


async def test_private_memory_is_not_mapped(source: Side, target: Side) -> None:
    plain = Slab(memoryview(bytearray(os.urandom(4 * BLOCK))), BLOCK)
    into = Slab(memoryview(bytearray(4 * BLOCK)), BLOCK)
    for _ in range(2):  # the second time all is known
        offer = source.agent.offer(plain, [3, 2, 1, 0], SOON_S)
        assert await target.agent.read(offer.ticket, into, [3, 2, 1, 0], SOON_S) == "nixl"
        assert into.memory == plain.memory


async def test_many_at_once(source: Side, target: Side) -> None:
    offers = [source.agent.offer(source.slab, [block], SOON_S) for block in range(NUM)]
    reads = [
        target.agent.read(each.ticket, target.slab, [NUM - 1 - block], SOON_S)
        for block, each in enumerate(offers)
    ]
    assert set(await asyncio.gather(*reads)) == {"nixl"}
    await asyncio.gather(*offers)
    assert (target.rows == source.rows[::-1]).all()


async def test_ranks_that_share_heads_differently(source: Side, target: Side) -> None:
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
    into = private_slab(3, model.block_bytes, SlabLayout.of_rank(model))
    for rank in range(2):
        layout = SlabLayout.of_rank(model, 2, rank)
        slab = private_slab(3, layout.block.block_bytes, layout)
        slab.memory[:] = np.ascontiguousarray(whole[:, :, :, 2 * rank : 2 * rank + 2]).tobytes()
        offer = source.agent.offer(slab, [0, 1, 2], SOON_S)
        assert await target.agent.read(offer.ticket, into, [2, 1, 0], SOON_S) == "nixl"
    got = np.frombuffer(into.memory, dtype=np.float32).reshape(whole.shape)
    assert (got[::-1] == whole).all()


def test_units() -> None:
    """Pieces that lie at no multiple of their size are made of smaller units."""
    here, there = Pieces(np.array([0, 12]), 8, 2), Pieces(np.array([4, 16]), 8, 2)
    assert unit_bytes_of(here, there) == 4
    assert units_of(here, 4).tolist() == [0, 1, 3, 4]
    assert units_of(there, 4).tolist() == [1, 2, 4, 5]
    whole = Pieces(np.array([0, 24]), 8)
    assert (unit_bytes_of(whole, whole), units_of(whole, 8).tolist()) == (8, [0, 3])


async def test_other_names_are_other_checksums(source: Side, target: Side) -> None:
    seeds = np.arange(3, dtype=np.uint64)
    offer = source.agent.offer(source.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    with pytest.raises(TransferFailed, match="block 2") as raised:
        wrong = np.array([0, 1, 7], dtype=np.uint64).tobytes()
        await target.agent.read(offer.ticket, target.slab, [1, 2, 3], SOON_S, seeds=wrong)
    assert raised.value.fields == {"path": "nixl", "reason": "checksum"}
    await target.agent.read(offer.ticket, target.slab, [1, 2, 3], SOON_S, seeds=seeds.tobytes())
    await offer


async def test_a_source_that_is_changed_too_early_is_found(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_checksums = summing.compute_checksums

    def then_change(*arguments: object) -> object:
        sums = compute_checksums(*arguments)  # type: ignore[arg-type]
        source.rows[2] ^= 1
        return sums

    monkeypatch.setattr(summing, "compute_checksums", then_change)
    with mute(source):
        offer = source.agent.offer(source.slab, [1, 2], SOON_S)
        read = target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S)
        await until(lambda: read_op_of(target) is not None and read_op_of(target)._num_checked == 2)
    with pytest.raises(TransferFailed, match="block 1"):
        await read


def read_op_of(side: Side) -> read_op_module.ReadOp:
    for read in list(side.nixl._reads):
        return read.read_op
    return None  # type: ignore[return-value]


async def test_tickets_that_are_not_known(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    with pytest.raises(NotFound, match="does not exist"):
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    assert source.nixl._num_served == 0


async def test_a_peer_that_names_blocks_that_there_are_not(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(op: int, slab: int, blocks: bytes) -> wire.Ready:
        return wire.Ready(op, slab, named.tobytes())

    monkeypatch.setattr(serving, "wire", SimpleNamespace(**{**vars(wire), "Ready": more}))
    named = np.array([1, NUM + 5])
    offer = source.agent.offer(source.slab, [1, 2], SOON_S)
    with pytest.raises(ProtocolError, match="outside"):
        await target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S)
    named = np.array([1, 2, 3])
    with pytest.raises(Exception, match="announced 3 blocks for 2"):
        await target.agent.read(offer.ticket, target.slab, [1, 2], SOON_S)
    assert not target.rows.any()


async def test_nothing_spins(source: Side, target: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a peer lets us wait it is asked for now and then, and nothing at all happens when nothing is under way."""
    turns: list[Nixl] = []
    step = Nixl.step

    def counted(self: Nixl) -> bool:
        turns.append(self)
        return step(self)

    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    with mute(source):
        read = target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S)
        await under_way(target)
        await asyncio.sleep(0.05)
        monkeypatch.setattr(Nixl, "step", counted)
        await asyncio.sleep(0.2)
        assert 0 < len(turns) < 1000
    await read
    await until(lambda: not source.nixl._num_served)
    await asyncio.sleep(0.05)
    turns.clear()
    await asyncio.sleep(0.05)
    assert not turns


async def test_memory_is_registered_once_and_forgotten_when_it_is_closed(
    source: Side, sides: Callable[..., Side]
) -> None:
    target, first = sides(shared_memory=False), Slab.shared(NUM, BLOCK)
    first.memory[:BLOCK] = bytes([1]) * BLOCK
    for _ in range(2):
        offer = source.agent.offer(first, [0], SOON_S)
        await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
        assert source.nixl._local_memory is not None
        assert len(source.nixl._local_memory._known) == 1
    assert target.rows[1].all()
    await until(lambda: not source.nixl._num_served)
    first.close()
    second = Slab.shared(NUM, BLOCK)
    offer = source.agent.offer(second, [1], SOON_S)
    assert await target.agent.read(offer.ticket, target.slab, [1], SOON_S) == "nixl"
    assert len(source.nixl._local_memory._known) == 1
    assert not target.rows[1].any()


def test_nothing_is_left_behind() -> None:
    one, two = Side(seed=1), Side()
    before = len(os.listdir("/proc/self/fd"))
    offer = one.agent.offer(one.slab, range(NUM), SOON_S)
    assert two.agent.read(offer.ticket, two.slab, range(NUM), SOON_S).result(SOON_S) == "nixl"
    for side in (one, two):
        side.agent.close()
        del side.rows
        side.slab.close()
    assert len(os.listdir("/proc/self/fd")) < before
