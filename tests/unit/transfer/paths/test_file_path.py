"""Files: blocks lie in a file as they lay in memory, and come back; a file of another process is sent."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import Cancelled, ConfigError, InvalidRequest, TransferFailed, Unsupported
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.paths import file_path
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.peer import chunks

BLOCK = 4096
NUM = 64
SOON_S = 20.0


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    agent = TransferAgent()
    yield agent
    agent.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Slab]:
    slab = Slab.of_file(tmp_path / "blocks", NUM, BLOCK)
    yield slab
    slab.close()
    slab.close()


@pytest.fixture
def memory() -> Slab:
    slab = Slab.shared(NUM, BLOCK)
    slab.memory[:] = np.random.default_rng(1).integers(0, 256, NUM * BLOCK, dtype=np.uint8).tobytes()
    return slab


def rows(slab: Slab) -> np.ndarray:
    return np.frombuffer(slab.memory, dtype=np.uint8).reshape(slab.num_blocks, slab.block_bytes)


def in_file(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), dtype=np.uint8).reshape(-1, BLOCK)


async def test_to_a_file_and_back(
    agent: TransferAgent, file: Slab, memory: Slab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several turns, in any order."""
    monkeypatch.setattr(file_path, "_STEP_BYTES", 7 * BLOCK)
    order = np.random.default_rng(2).permutation(NUM)
    out = agent.offer(memory, order, SOON_S)
    write = agent.read(out.ticket, file, np.arange(NUM), SOON_S)
    assert await write == "file"
    await out
    assert (in_file(tmp_path / "blocks") == rows(memory)[order]).all()
    back, other = Slab.shared(NUM, BLOCK), np.random.default_rng(3).permutation(NUM)
    offer = agent.offer(file, other, SOON_S)
    assert await agent.read(offer.ticket, back, np.arange(NUM), SOON_S) == "file"
    assert (rows(back) == rows(memory)[order][other]).all()


async def test_a_write_goes_to_a_file(agent: TransferAgent, file: Slab, memory: Slab, tmp_path: Path) -> None:
    accept = agent.accept(file, [5, 6], SOON_S)
    await agent.write(accept.ticket, memory, [1, 2], SOON_S)
    await accept
    assert (in_file(tmp_path / "blocks")[[5, 6]] == rows(memory)[[1, 2]]).all()


async def test_shares_of_blocks(agent: TransferAgent, tmp_path: Path) -> None:
    """A rank's share of the heads out of whole blocks of a file."""
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
    file = Slab.of_file(tmp_path / "kv", 3, model.block_bytes, SlabLayout.of_rank(model))
    (tmp_path / "kv").write_bytes(whole.tobytes())
    share = SlabLayout.of_rank(model, 2, 1)
    into = Slab.shared(3, share.block.block_bytes, share)
    offer = agent.offer(file, [0, 1, 2], SOON_S)
    await agent.read(offer.ticket, into, [2, 1, 0], SOON_S)
    got = np.frombuffer(into.memory, dtype=np.float32).reshape(3, 2, 2, 2, 4, 8)
    assert (got[::-1] == whole[:, :, :, 2:]).all()
    file.close()


async def test_a_file_of_another_agent_is_sent(
    agent: TransferAgent, file: Slab, memory: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of memory of a chunk's size, with checksums."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3 * BLOCK)
    out = agent.offer(memory, range(NUM), SOON_S)
    await agent.read(out.ticket, file, range(NUM), SOON_S)
    reader, into = TransferAgent(), Slab.shared(NUM, BLOCK)
    try:
        order = np.random.default_rng(4).permutation(NUM)
        offer = agent.offer(file, order, SOON_S)
        assert await reader.read(offer.ticket, into, range(NUM), SOON_S) == "tcp"
        await offer
        assert (rows(into) == rows(memory)[order]).all()
        (served,) = (each for each in agent._hub._sessions if each._staging._plain)
        assert len(served._staging._plain) == 3 * BLOCK
    finally:
        reader.close()


async def test_a_file_that_fails_while_it_is_sent(agent: TransferAgent, file: Slab) -> None:
    """The read fails and says why; others over the same connection do not."""
    reader, into = TransferAgent(), Slab.shared(NUM, BLOCK)
    plain = Slab(memoryview(bytearray(b"x" * BLOCK)), BLOCK)
    try:
        assert file.descriptor is not None
        os.ftruncate(file.descriptor, BLOCK)
        offer = agent.offer(file, range(NUM), SOON_S)
        with pytest.raises(TransferFailed, match="truncated"):
            await reader.read(offer.ticket, into, range(NUM), SOON_S)
        fine = agent.offer(plain, [0], SOON_S)
        assert await reader.read(fine.ticket, into, [3], SOON_S) == "tcp"
    finally:
        reader.close()


async def test_what_cannot_be(agent: TransferAgent, file: Slab, memory: Slab, tmp_path: Path) -> None:
    second = Slab.of_file(tmp_path / "second", NUM, BLOCK)
    offer = agent.offer(file, [1], SOON_S)
    with pytest.raises(Unsupported, match="between a file and file memory"):
        await agent.read(offer.ticket, second, [1], SOON_S)
    with pytest.raises(InvalidRequest, match="outside the 1 offered"):
        await agent.read(offer.ticket, memory, [1], SOON_S, positions=[3])
    other = TransferAgent()
    try:
        remote = other.offer(memory, [1], SOON_S)
        with pytest.raises(Unsupported, match="into memory first"):
            await agent.read(remote.ticket, second, [1], SOON_S)
    finally:
        other.close()
    second.close()
    with pytest.raises(TransferFailed, match="closed"):
        await agent.read(agent.offer(memory, [1], SOON_S).ticket, second, [1], SOON_S)
    with pytest.raises(ConfigError, match="No such file"):
        Slab.of_file(tmp_path / "nowhere" / "blocks", NUM, BLOCK)
    with pytest.raises(ConfigError, match="too large"):
        Slab.of_file(tmp_path / "huge", 1 << 31, 1 << 32)
    with pytest.raises(InvalidRequest, match="invalid slab"):
        Slab.of_file(tmp_path / "none", 0, BLOCK)


async def test_a_full_disk(
    agent: TransferAgent, file: Slab, memory: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    offer = agent.offer(memory, [1], SOON_S)
    with pytest.raises(TransferFailed, match="cannot write the block file: No space left") as raised:
        await agent.read(offer.ticket, file, [1], SOON_S)
    assert raised.value.fields["path"] == "file"


async def test_cancel_in_the_middle(
    agent: TransferAgent, file: Slab, memory: Slab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_path, "_STEP_BYTES", BLOCK)
    step, is_asked = file_path.FileMover.step, threading.Event()

    def then_cancel(self: file_path.FileMover) -> bool:
        assert is_asked.wait(SOON_S)
        read.cancel()
        return step(self)

    monkeypatch.setattr(file_path.FileMover, "step", then_cancel)
    offer = agent.offer(memory, range(NUM), SOON_S)
    read = agent.read(offer.ticket, file, range(NUM), SOON_S)
    is_asked.set()
    with pytest.raises(Cancelled):
        await read
    assert 0 < in_file(tmp_path / "blocks").any(axis=1).sum() < NUM / 2


def test_a_file_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(b"1" * (2 * BLOCK + 5))
    slab = Slab.of_file(path, 2, BLOCK)
    assert (slab.kind, slab.num_blocks, len(slab.memory)) == (MemoryKind.FILE, 2, 0)
    slab.close()
    grown = Slab.of_file(path, 4, BLOCK)
    grown.close()
    assert path.read_bytes() == b"1" * (2 * BLOCK + 5) + b"\0" * (2 * BLOCK - 5)


def test_runs_are_whole_calls() -> None:
    def found(file_offsets: list[int], offsets: list[int]) -> list[tuple[int, list[tuple[int, int]]]]:
        return list(file_path.runs(np.array(file_offsets), np.array(offsets), 10))

    assert found([20, 0, 10], [50, 30, 40]) == [(0, [(30, 60)])]
    assert found([0, 10, 20], [50, 0, 10]) == [(0, [(50, 60), (0, 20)])]
    assert found([0, 20, 30, 50], [0, 10, 20, 30]) == [(0, [(0, 10)]), (20, [(10, 30)]), (50, [(30, 40)])]


def test_runs_are_as_long_as_a_call_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_path, "_MAX_RANGES", 2)
    offsets = np.array([0, 20, 40, 60, 80])
    calls = list(file_path.runs(np.arange(5) * 10, offsets, 10))
    assert calls == [(0, [(0, 10), (20, 30)]), (20, [(40, 50), (60, 70)]), (40, [(80, 90)])]


def test_a_call_that_moves_less_goes_on(
    file: Slab, memory: Slab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwritev

    def few(descriptor: int, views: list[memoryview], at: int) -> int:
        return whole(descriptor, [views[0][:1000]], at)

    monkeypatch.setattr(os, "pwritev", few)
    numbers = np.arange(NUM)
    file_path.write_file(file, file.pieces(numbers), memory.memory, memory.pieces(numbers[::-1]).offsets)
    assert (in_file(tmp_path / "blocks") == rows(memory)[::-1]).all()
