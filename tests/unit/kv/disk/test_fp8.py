"""Numbers in eight bits: what becomes of them, in C as in numpy, and of blocks that lie so on a disk."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.kv.tiers.tier_lab import Device, in_eight_bits, keys, sequence

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.disk import fp8, fp8_python
from kvolt.kv.disk.blocks import DiskBlocks
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.fp8_python import GROUP, KINDS, WIDTHS, packed_bytes
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers

native: Any = importlib.import_module("kvolt.kv.disk._fp8_native") if fp8.IS_NATIVE else None
FORMS: list[str | None] = [None, *(native.FORMS if native else ())]
ONLY = np.zeros(1, dtype=np.int64)
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=FORMS, ids=lambda form: form or "numpy")
def code(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Every form that there is here."""
    if request.param is None:
        yield fp8_python
        return
    native.use_form(request.param)
    yield native
    native.use_form(native.FORMS[-1])


def narrow(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """As an engine has them."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def wide(data: bytes | Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype=dtype).astype(np.float32)


def encoded(code: Any, data: Bytes, dtype: str) -> bytes:
    kind = KINDS.index(dtype)
    num_values = data.nbytes // WIDTHS[kind]
    packed = bytearray(packed_bytes(num_values))
    code.encode(memoryview(packed), ONLY, memoryview(data.tobytes()), ONLY, num_values, kind)
    return bytes(packed)


def decoded(code: Any, packed: bytes, num_values: int, dtype: str) -> bytes:
    kind = KINDS.index(dtype)
    data = bytearray(num_values * WIDTHS[kind])
    code.decode(memoryview(data), ONLY, memoryview(packed), ONLY, num_values, kind)
    return bytes(data)


def back(code: Any, values: npt.ArrayLike, dtype: str = "float32") -> npt.NDArray[np.float32]:
    data = narrow(np.asarray(values, dtype=np.float32), dtype)
    num_values = data.nbytes // WIDTHS[KINDS.index(dtype)]
    return wide(decoded(code, encoded(code, data, dtype), num_values, dtype), dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_a_value_is_off_by_a_sixteenth_at_most(code: Any, dtype: str) -> None:
    draw = np.random.default_rng(3)
    scales = 2.0 ** draw.integers(-12, 12, size=(200, 1))
    values = wide(
        narrow((draw.standard_normal((200, GROUP)) * scales).astype(np.float32).ravel(), dtype), dtype
    )
    groups, came = values.reshape(-1, GROUP), back(code, values, dtype).reshape(-1, GROUP)
    off, largest = np.abs(came - groups), np.abs(groups).max(axis=1, keepdims=True)
    assert np.all(off <= np.maximum(np.abs(groups) / 16, largest / 230_000))
    assert off.max() > 0, "it is lossy"


def test_another_library_says_the_same(code: Any) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(4).standard_normal(40 * GROUP).astype(np.float32)
    packed = encoded(code, values.view(np.uint8), "float32")
    codes, tops = np.frombuffer(packed, dtype=np.uint8)[: len(values)], packed[len(values) :]
    scales = np.repeat([2.0 ** (top - 135) for top in tops], GROUP).astype(np.float32)
    scaled = torch.from_numpy(values / scales).to(torch.float8_e4m3fn)
    assert np.array_equal(scaled.view(torch.uint8).numpy(), codes)
    assert max(np.abs(scaled.float().numpy())) <= 448


def test_what_was_rounded_once_is_not_rounded_again(code: Any) -> None:
    once = back(code, np.random.default_rng(5).standard_normal(1000))
    assert np.array_equal(back(code, once), once)


@pytest.mark.parametrize("dtype", KINDS)
def test_numbers_at_the_ends(code: Any, dtype: str) -> None:
    zeros = back(code, [0.0, -0.0] * 40, dtype)
    assert not zeros.any()
    assert np.signbit(zeros).tolist() == [False, True] * 40
    largest = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
    came = back(code, [largest, -largest, 1.0], dtype)
    assert np.isfinite(came).all(), "nothing is rounded to infinity"
    assert came.tolist()[:2] == pytest.approx([largest, -largest])
    others = back(code, [np.nan, np.inf, -np.inf, 1.0, -448.0], dtype)
    assert np.isnan(others).tolist() == [True, True, True, False, False], "what is no number looks like none"
    assert others.tolist()[3:] == [1.0, -448.0], "and spoils no other"
    tiny = {"float32": 1e-45, "float16": 6e-8, "bfloat16": 1e-40}[dtype]
    assert abs(back(code, [tiny] * 3, dtype)).max() <= 2 * tiny
    assert back(code, [6e-8, 1.0], dtype).tolist() == [0.0, 1.0]


def test_a_small_group_keeps_its_digits_beside_a_large_one(code: Any) -> None:
    values = np.concatenate((np.full(GROUP, 1000.0), np.full(GROUP, 0.001), [3.0]))
    assert back(code, values) == pytest.approx(values, rel=1 / 16)


@pytest.mark.skipif(native is None, reason="there is no native module here")
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("dtype", KINDS)
def test_c_and_numpy_agree_to_the_last_bit(dtype: str, form: str) -> None:
    draw, width = np.random.default_rng(6), WIDTHS[KINDS.index(dtype)]
    native.use_form(form)
    rows = [draw.integers(0, 256, width * int(count), dtype=np.uint8) for count in draw.integers(1, 300, 60)]
    rows += [narrow((draw.standard_normal(777) * 2.0**e).astype(np.float32), dtype) for e in range(-20, 14)]
    if width == 2:  # every number that there is
        rows += [np.arange(65536, dtype=np.uint16).view(np.uint8)]
        rows += [draw.permutation(65536).astype(np.uint16).view(np.uint8)]
    for data in rows:
        packed = encoded(native, data, dtype)
        assert packed == encoded(fp8_python, data, dtype)
        count = data.nbytes // width
        assert decoded(native, packed, count, dtype) == decoded(fp8_python, packed, count, dtype)
    native.use_form(native.FORMS[-1])


def test_pieces_outside_of_their_memory_are_refused(code: Any) -> None:
    src, dst = memoryview(bytes(256)), memoryview(bytearray(65))
    code.encode(dst, ONLY, src, ONLY, 64, 0)
    for bad in (
        (dst, ONLY, src, ONLY, 65, 0),
        (dst, ONLY, src, ONLY + 1, 64, 0),
        (dst, ONLY - 1, src, ONLY, 64, 0),
        (dst[:64], ONLY, src, ONLY, 64, 0),
        (dst, np.zeros(2, dtype=np.int64), src, ONLY, 64, 0),
        (dst, ONLY, src, ONLY, 0, 0),
        (dst, ONLY, src, ONLY, 64, 3),
    ):
        with pytest.raises(ValueError, match=r"outside|invalid piece|counts differ"):
            code.encode(*bad)
    with pytest.raises(ValueError, match="outside"):
        code.decode(memoryview(bytearray(255)), ONLY, dst, ONLY, 64, 0)


@pytest.mark.skipif(native is None, reason="there is no native module here")
def test_c_takes_no_other_numbers_for_offsets() -> None:
    src, dst = memoryview(bytes(256)), memoryview(bytearray(65))
    for bad in (
        (dst, ONLY.astype(np.int32), src, ONLY, 64, 0),
        (bytes(65), ONLY, src, ONLY, 64, 0),
        (dst, ONLY, dst, ONLY, 16, 0),
        (dst, np.zeros(4, dtype=np.int64)[::2], src, ONLY, 64, 0),
    ):
        with pytest.raises(ValueError, match=r"64-bit|read-only|overlap|contiguous"):
            native.encode(*bad)
    with pytest.raises(ValueError, match="unknown implementation"):
        native.use_form("abacus")


def test_without_the_native_module_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvolt.kv.disk._fp8_native", None)
    monkeypatch.delitem(sys.modules, "kvolt.kv.disk.fp8")
    again = importlib.import_module("kvolt.kv.disk.fp8")
    assert not again.IS_NATIVE
    assert again.encode is fp8_python.encode


# --- blocks


@pytest.mark.parametrize(("dtype", "ratio"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_slot_takes_about_half_or_a_quarter(dtype: str, ratio: int) -> None:
    shape = BlockShape(1 << 20, 2, dtype)
    form = Fp8.of(shape)
    packed = form.packed(shape)
    assert packed.slot_bytes / shape.slot_bytes == pytest.approx((1 + 1 / GROUP) / ratio, rel=0.01)
    assert form.unpacked(packed) == shape
    assert Fp8.named(form.name) == form
    assert [Fp8.named(other) for other in ("", "fp8x32-float32", "fp8x64-int4")] == [None] * 3


@pytest.mark.parametrize(
    "shape", [BlockShape(100, 1, "fp8_e4m3"), BlockShape(100), BlockShape(101, 1, "float16")]
)
def test_values_that_it_does_not_know_are_refused_with_a_remedy(shape: BlockShape) -> None:
    with pytest.raises(ConfigError, match="cannot store the KV of this engine as fp8") as told:
        Fp8.of(shape)
    assert "disk_compression" in told.value.fields["remedy"]


def numbers_device(num_blocks: int, dtype: str = "bfloat16", num_ranks: int = 1) -> Device:
    """An engine's memory that says what its values are."""
    memory = Device(num_blocks, num_ranks)
    layout = KvLayout(
        name="any", dtype=dtype, num_layers=1, num_kv_heads=num_ranks, head_dim=1, block_size=1, block_bytes=1
    )
    for rank, slab in enumerate(memory.slabs):
        slab.layout = SlabLayout.of_rank(layout, num_ranks, rank)
    return memory


def of_slab(memory: Device, number: int) -> bytes:
    start = number * memory.block_bytes
    return b"".join(bytes(slab.memory[start : start + memory.block_bytes]) for slab in memory.slabs)


async def test_blocks_come_back_near_to_what_they_were(tmp_path: Path) -> None:
    memory = numbers_device(48, num_ranks=2)
    shape = BlockShape.of(memory.slabs)
    assert shape.dtype == "bfloat16"
    disk = DiskTier(DiskFiles(tmp_path, shape, 64, Fp8.of(shape)))
    cache = TieredCache.for_slabs(memory.slabs, 8, [(disk, 1)])
    await cache.start()
    blocks = sequence("a", 6)
    memory.compute(blocks, range(6))
    before = [of_slab(memory, number) for number in range(6)]
    await cache.offload(blocks, range(6))
    await until(lambda: len(disk) == 6)
    others = sequence("b", 8)
    memory.compute(others, range(10, 18))
    await cache.offload(others, range(10, 18))
    assert cache.host.find_tiers(keys(blocks)) == [Tier.DISK] * 6
    fetched = await cache.onboard(blocks, range(30, 36))
    assert fetched.by_tier == ((Tier.DISK, 6),), "with checksums that those above expect"
    assert [of_slab(memory, number) for number in range(30, 36)] == [
        in_eight_bits(data, shape) for data in before
    ]
    assert cache.host.shape_in(Tier.DISK) == disk.shape
    assert cache.host.shape_in(Tier.HOST) == shape
    cache.host.check_integrity()
    await cache.close()
    memory.close()


async def until(is_so: Any) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.005)


SHAPE = BlockShape(5000, 1, "bfloat16")


def write_some(folder: Path, form: Fp8 | None, shape: BlockShape = SHAPE) -> DiskFiles:
    """Four blocks, the folder is let go."""
    files, memory = DiskFiles(folder, shape, 16, form), SlotMemory(shape, 4)
    there, places, blocks = DiskBlocks(files), np.arange(4, dtype=np.int64), sequence("a", 4)
    for place in range(4):
        with memory.block(place) as view:
            view[:] = np.random.default_rng(place).bytes(shape.block_bytes)
    sums = memory.checksums(places, keys(blocks)).tolist()
    assert None not in there.write(blocks, sums, [Slot(place) for place in range(4)], memory, places)
    there.close()
    files.close()
    memory.close()
    return files


def test_blocks_of_another_form_are_never_found(tmp_path: Path) -> None:
    form = Fp8.of(SHAPE)
    halves = BlockShape(5000, 1, "float16")
    packed = write_some(tmp_path, form)
    assert write_some(tmp_path, None).folder != packed.folder
    # Blocks of as many bytes: of another dtype, and such as are what others are at rest.
    for shape, other in ((halves, Fp8.of(halves)), (form.packed(SHAPE), None)):
        files = DiskFiles(tmp_path, shape, 16, other)
        assert files.shape == form.packed(SHAPE)
        assert files.recover() == []
        files.close()
    again = DiskFiles(tmp_path, SHAPE, 16, form)
    assert len(again.recover()) == 4
    again.close()


def test_a_folder_that_was_moved_to_where_another_belongs_is_refused(tmp_path: Path) -> None:
    form = Fp8.of(SHAPE)
    folder = write_some(tmp_path, form).folder
    about = json.loads((folder / "about.json").read_bytes())
    assert about["form"] == "fp8x64-bfloat16"
    folder.parent.rename(folder.parent.with_name(folder.parent.name.removesuffix("-fp8x64-bfloat16")))
    with pytest.raises(ConfigError, match="another kind"):
        DiskFiles(tmp_path, form.packed(SHAPE), 16)
    assert [path.name for path in tmp_path.iterdir()] == ["v1-2540x1"], "and its lock is free"


def test_what_was_spoiled_in_the_memory_is_not_whole_on_the_disk(tmp_path: Path) -> None:
    files, memory = DiskFiles(tmp_path, SHAPE, 16, Fp8.of(SHAPE)), SlotMemory(SHAPE, 4)
    there, places, blocks = DiskBlocks(files), np.arange(4, dtype=np.int64), sequence("a", 4)
    sums = memory.checksums(places, keys(blocks)).tolist()
    with memory.block(2) as view:
        view[77] ^= 64
    kept = there.write(blocks, sums, [Slot(place) for place in range(4)], memory, places)
    assert [each is None for each in kept] == [False, False, True, False]
    assert [each.block for each in files.recover()] == [blocks[0], blocks[1], blocks[3]]
    there.close()
    files.close()
    memory.close()


async def test_a_tier_does_not_keep_what_was_spoiled_above_it(tmp_path: Path) -> None:
    tier, memory = DiskTier(DiskFiles(tmp_path, SHAPE, 16, Fp8.of(SHAPE))), SlotMemory(SHAPE, 4)
    spoiled: list[BlockKey] = []
    tier.on_corrupt = spoiled.append
    await tier.start()
    places, blocks = np.arange(4, dtype=np.int64), sequence("a", 4)
    sums = memory.checksums(places, keys(blocks)).tolist()
    sums[1] ^= 1
    await tier.write(blocks, sums, memory, places)
    assert [tier.has(block.key) for block in blocks] == [True, False, True, True]
    assert spoiled == [blocks[1].key]
    tier.check_integrity()
    await tier.close()
    memory.close()


async def test_what_was_spoiled_in_the_host_is_not_found_there_any_more(tmp_path: Path) -> None:
    """It would be offered to the disk each time it is asked for."""
    tier = DiskTier(DiskFiles(tmp_path, SHAPE, 16, Fp8.of(SHAPE)))
    host, blocks = HostTier(SHAPE, 8, [(tier, 1)]), sequence("a", 4)

    async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
        sums = host.memory.checksums(slots, keys(blocks))
        sums[1] ^= np.uint64(1)
        return sums, 0.0

    await host.start()
    await host.store(blocks, fill)
    async with asyncio.timeout(20):
        while len(tier) < 3 or host.slot_table.has(blocks[1].key):
            await asyncio.sleep(0.005)
    assert host.stats[Tier.HOST].failures["corrupt"] == 1
    await host.close()
