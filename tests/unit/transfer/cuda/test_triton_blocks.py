"""Blocks of a device, interpreted on the CPU beside the definition; on a device `benchmarks/transfer/gpu_blocks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if os.environ.get("TRITON_INTERPRET") != "1":
    # Triton reads this when its own library and our kernels are defined: a copy that was there before is of no use.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
            del sys.modules[name]
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvolt.transfer.cuda import triton_blocks as cuda_blocks  # noqa: E402
from kvolt.transfer.cuda.triton_blocks import DeviceBlocks  # noqa: E402
from kvolt.transfer.memory.checksum import checksums, finish  # noqa: E402

ROOT = Path(__file__).parents[4]
BLOCKS = DeviceBlocks(torch.device("cpu"), max_programs=3)


def memory(num_bytes: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


def numbers(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def row_offsets(
    pieces: np.ndarray[Any, np.dtype[np.int64]], size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Offsets of as many contiguous pieces."""
    return np.arange(len(pieces), dtype=np.int64) * size


def test_the_kernel_runs_interpreted() -> None:
    assert type(cuda_blocks._move_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("words", [1, 2, 3, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("pieces_per_block", [1, 3])
def test_gather_and_scatter(words: int, pieces_per_block: int) -> None:
    size, count = 8 * words, 6
    slab, row = memory(10 * size + 16), torch.zeros(count * size + 8, dtype=torch.uint8)
    offsets = numbers(5, 0, 9, 3, 8, 1) * size
    seeds = np.arange(count // pieces_per_block, dtype=np.uint64) + np.uint64(2**64 - 3)
    expected = checksums(slab.numpy(), offsets, size, pieces_per_block, seeds).tolist()
    gathered = BLOCKS.copy(row, row_offsets(offsets, size), slab, offsets, size, pieces_per_block, seeds)
    assert gathered.is_done()
    assert gathered.checksums().tolist() == expected
    for index, offset in enumerate(offsets):
        assert torch.equal(row[index * size : (index + 1) * size], slab[offset : offset + size])
    assert not row[count * size :].any()
    other = torch.zeros_like(slab)
    moved = BLOCKS.copy(other, offsets, row, row_offsets(offsets, size), size, pieces_per_block, seeds)
    assert moved.checksums().tolist() == expected
    for index in range(10):
        here = slice(index * size, (index + 1) * size)
        if index * size in offsets:
            assert torch.equal(other[here], slab[here])
        else:
            assert not other[here].any()


def test_blocks_of_any_type_of_value() -> None:
    slab = torch.randn(4, 3, 8).to(torch.bfloat16)
    taken = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    moved = BLOCKS.copy(taken, row_offsets(numbers(96, 0) // 2, 48), slab, numbers(96, 0) // 2, 48)
    assert torch.equal(taken.view(-1), slab.view(-1)[[*range(24, 48), *range(24)]])
    raw = slab.view(-1).view(torch.uint8).numpy()
    assert moved.checksums().tolist() == checksums(raw, numbers(48, 0), 48).tolist()


def test_from_slab_to_slab() -> None:
    src, dst = memory(256), torch.zeros(256, dtype=torch.uint8)
    moved = BLOCKS.copy(dst, numbers(8, 200), src, numbers(104, 0), 56)
    assert torch.equal(dst[8:64], src[104:160])
    assert torch.equal(dst[200:256], src[:56])
    assert not dst[:8].any()
    assert not dst[64:200].any()
    assert moved.checksums().tolist() == checksums(src.numpy(), numbers(104, 0), 56).tolist()


def test_inside_one_slab() -> None:
    slab = memory(128)
    before = slab.clone()
    BLOCKS.copy(slab, numbers(0, 64), slab, numbers(32, 96), 32).checksums()
    assert torch.equal(slab[:64].view(2, 32)[0], before[32:64])
    with pytest.raises(ValueError, match="dst and src overlap"):
        BLOCKS.copy(slab, numbers(0, 32), slab, numbers(64, 40), 32)
    with pytest.raises(ValueError, match="dst and src overlap"):
        BLOCKS.copy(slab[64:], row_offsets(numbers(72), 32), slab, numbers(72), 32)


def test_blocks_that_stay() -> None:
    slab = memory(640)
    before = slab.clone()
    offsets = numbers(0, 320, 64, 8)
    assert (
        BLOCKS.checksums(slab, offsets, 40, 2).checksums().tolist()
        == checksums(slab.numpy(), offsets, 40, 2).tolist()
    )
    assert torch.equal(slab, before)
    assert BLOCKS.checksums(slab, numbers(), 40).checksums().tolist() == []


@settings(max_examples=30)
@given(
    words=st.integers(1, 40),
    pieces_per_block=st.integers(1, 3),
    num_blocks=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_it_does_what_the_definition_does(
    words: int, pieces_per_block: int, num_blocks: int, seed: int, data: st.DataObject
) -> None:
    count, size = num_blocks * pieces_per_block, 8 * words
    src = memory(size + 8 * data.draw(st.integers(0, 100)))
    at = st.integers(0, (src.nbytes - size) // 8)
    offsets = np.array(data.draw(st.lists(at, min_size=count, max_size=count)), dtype=np.int64) * 8
    row = torch.zeros(count * size, dtype=torch.uint8)
    seeds = np.full(num_blocks, seed, dtype=np.uint64)
    moved = BLOCKS.copy(row, row_offsets(offsets, size), src, offsets, size, pieces_per_block, seeds)
    assert (
        moved.checksums().tolist()
        == checksums(src.numpy(), offsets, size, pieces_per_block, seeds).tolist()
        == checksums(
            row.numpy(), np.arange(count, dtype=np.int64) * size, size, pieces_per_block, seeds
        ).tolist()
    )


@pytest.mark.parametrize(
    ("places", "origins", "size", "pieces_per_block", "seeds", "why"),
    [
        ([0], [120], 16, 1, None, "src_offsets: piece 0 at offset 120"),
        ([-8], [0], 16, 1, None, "dst_offsets: piece 0 at offset -8"),
        ([0], [0], 0, 1, None, "at least one byte"),
        ([0], [0, 16], 16, 1, None, "2 source pieces for 1"),
        ([0], [0], 16, 2, None, "not a multiple"),
        ([0], [0], 12, 1, None, "multiple of 8"),
        ([4], [0], 16, 1, None, "multiple of 8"),
        ([0], [20], 16, 1, None, "multiple of 8"),
        ([0], [0], 16, 1, [1, 2], "seeds has 2 numbers for 1"),
    ],
)
def test_what_is_refused(
    places: list[int],
    origins: list[int],
    size: int,
    pieces_per_block: int,
    seeds: list[int] | None,
    why: str,
) -> None:
    src, dst = memory(128), torch.zeros(128, dtype=torch.uint8)
    own_seeds = None if seeds is None else np.array(seeds, dtype=np.uint64)
    with pytest.raises(ValueError, match=why):
        BLOCKS.copy(dst, numbers(*places), src, numbers(*origins), size, pieces_per_block, own_seeds)
    assert not dst.any()


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="must be contiguous"):
        BLOCKS.checksums(memory(128).view(8, 16)[:, :8], numbers(0), 16)
    with pytest.raises(ValueError, match="multiple of 8"):
        BLOCKS.checksums(memory(128)[3:], numbers(0), 16)


class Stream:
    """Fake device: done once awaited, and only then the sums are on the host."""

    def __init__(self, sums: list[int]) -> None:
        self.sums = torch.tensor(sums, dtype=torch.int64)
        self.on_host = torch.zeros_like(self.sums)
        self.is_recorded = self.is_done = False
        self.is_cuda, self.shape, self.dtype = True, self.sums.shape, self.sums.dtype

    def copy_(self, sums: Stream, non_blocking: bool) -> None:
        assert non_blocking
        assert not self.is_recorded

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        assert self.is_recorded
        self.is_done = True
        self.on_host.copy_(self.sums)

    def numpy(self) -> Any:
        return self.on_host.numpy()


def test_checksums_of_a_device_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream([-5, 7])
    monkeypatch.setattr(torch.cuda, "Event", lambda: stream)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda shape, dtype, pin_memory: stream)
        moved = cuda_blocks.PendingMove(stream, 40, None)
    moved.record()
    assert not moved.is_done()
    expected = finish(np.array([2**64 - 5, 7], dtype=np.uint64), 40)
    assert moved.checksums().tolist() == expected.tolist()
    assert moved.is_done()


def test_what_was_launched_is_waited_for_when_the_rest_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise blocks would be written after the caller got the error."""
    monkeypatch.setattr(cuda_blocks, "_BATCH_PIECES", 1)
    blocks, told = DeviceBlocks(torch.device("cpu"), max_programs=1), []
    move = blocks._move

    def once(*arguments: Any) -> None:
        if told:
            told.append("refused")
            raise RuntimeError("out of memory")
        move(*arguments)
        told.append("record")

    monkeypatch.setattr(blocks, "_move", once)
    monkeypatch.setattr(blocks, "_synchronize", lambda: told.append("settled"))
    with pytest.raises(RuntimeError):
        blocks.checksums(memory(64), numbers(0, 8, 16), 8)
    assert told == ["record", "refused", "settled"]


def test_a_transfer_takes_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: Any) -> Any:
        return SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert DeviceBlocks(torch.device("cuda:1"))._max_programs == 4 * 132
    assert DeviceBlocks(torch.device("cuda:1"), max_programs=16)._max_programs == 16


def script(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.transfer.gpu_blocks", *arguments],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device() -> None:
    assert "all checks passed" in script("--checks", TRITON_INTERPRET="0")
