"""A disk tier after a crash at any moment: what is found is whole, whatever the disk had not been told to keep."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import BLOCK_BYTES, contents, in_eight_bits, sequence

from kvolt.kv.disk.blocks import DiskBlocks
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot, TierBlock

SHAPE = BlockShape(BLOCK_BYTES, dtype="bfloat16")
FORMS = [None, Fp8.of(SHAPE)]
NUM_SLOTS = 6
SECTOR_BYTES = 512
NUM_LOSSES = 3
"""Ways of losing what was not to be kept, tried at each moment."""


@dataclass
class Recorded:
    """A file system that remembers what was written since it was last told to keep it."""

    root: Path
    kept: dict[str, bytes] = field(default_factory=dict)
    """Contents of files that survive for certain."""
    loose: list[tuple[str, int, bytes]] = field(default_factory=list)
    """Writes that may be lost, whole or in sectors: file, where, what."""
    moments: list[tuple[dict[str, bytes], list[tuple[str, int, bytes]]]] = field(default_factory=list)

    def mark(self) -> None:
        self.moments.append((dict(self.kept), list(self.loose)))

    def write(self, path: str, at: int, data: bytes) -> None:
        self.loose.append((path, at, data))
        self.mark()

    def keep(self, path: str) -> None:
        for name, at, data in self.loose:
            if name == path:
                self.kept[name] = _written(self.kept.get(name, b""), at, data)
        self.loose = [each for each in self.loose if each[0] != path]
        self.mark()


def _written(data: bytes, at: int, more: bytes) -> bytes:
    data = data.ljust(at, b"\0")
    return data[:at] + more + data[at + len(more) :]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    root = tmp_path / "before"
    made = Recorded(root)

    def path_of(descriptor: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), root)

    real_pwritev, real_write = os.pwritev, os.write

    def pwritev(descriptor: int, views: list[memoryview], at: int) -> int:
        written = real_pwritev(descriptor, views, at)
        made.write(path_of(descriptor), at, b"".join(map(bytes, views))[:written])
        return written

    def write(descriptor: int, data: bytes) -> int:
        path = path_of(descriptor)
        at = os.fstat(descriptor).st_size
        written = real_write(descriptor, data)
        if not path.startswith(".."):
            made.write(path, at, bytes(data)[:written])
        return written

    real_replace = Path.replace

    def replace(self: Path, target: Path) -> Path:
        name, into = os.path.relpath(self, root), os.path.relpath(target, root)
        made.kept[into] = made.kept.pop(name, b"")
        made.loose = [each for each in made.loose if each[0] != into]
        found = real_replace(self, target)
        made.mark()
        return found

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: made.keep(path_of(descriptor)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: made.keep(path_of(descriptor)))
    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr("kvolt.kv.disk.journal._MIN_REWRITE_RECORDS", 8)
    return made


def use_for_a_while(folder: Path, rng: random.Random, form: Fp8 | None) -> None:
    """Blocks come and go, until slots have been used several times and the journal was written anew. What goes is told
    before others come, or with them."""
    files = DiskFiles(folder, SHAPE, NUM_SLOTS, form)
    files.recover()
    blocks_there = DiskBlocks(files)
    memory = SlotMemory(SHAPE, NUM_SLOTS)
    held: dict[Slot, TierBlock] = {}
    for turn in range(14):
        gone: list[Slot] = []
        if len(held) > 2:
            gone = rng.sample(sorted(held), rng.randint(1, 3))
            for slot in gone:
                del held[slot]
        if turn % 2 or len(held) + len(gone) == NUM_SLOTS:
            files.remove(gone)
            gone = []
        free = [Slot(slot) for slot in range(NUM_SLOTS) if slot not in held and slot not in gone]
        slots = rng.sample(free, min(len(free), 2))
        blocks = sequence(f"turn {turn}", len(slots))
        places = np.arange(len(slots), dtype=np.int64)
        fill(memory, blocks)
        sums = memory.checksums(places, [block.key for block in blocks]).tolist()
        assert None not in blocks_there.write(blocks, sums, slots, memory, places, gone)
        held.update(zip(slots, blocks, strict=True))
    blocks_there.close()
    files.close()
    memory.close()
    again = DiskFiles(folder, SHAPE, NUM_SLOTS, form)
    assert {each.slot: each.block for each in again.recover()} == held
    again.close()


def fill(memory: SlotMemory, blocks: list[TierBlock]) -> None:
    memory.grow_to(len(blocks))
    for part, numbers, which in memory.by_part(np.arange(len(blocks), dtype=np.int64)):
        for number, index in zip(numbers.tolist(), which.tolist(), strict=True):
            start = number * SHAPE.slot_bytes
            part.memory[start : start + BLOCK_BYTES] = contents(blocks[index])


def losses(loose: list[tuple[str, int, bytes]], rng: random.Random) -> Iterator[list[tuple[str, int, bytes]]]:
    """What may be left of writes that were not to be kept: none, all, or any sectors of any of them."""
    yield []
    yield loose
    for _ in range(NUM_LOSSES if loose else 0):
        left = []
        for path, at, data in loose:
            for start in range(0, len(data), SECTOR_BYTES):
                if rng.random() < 0.5:
                    left.append((path, at + start, data[start : start + SECTOR_BYTES]))
        yield left


@pytest.mark.parametrize("form", FORMS, ids=["plain", "fp8"])
def test_whatever_is_found_after_a_crash_is_whole(
    tmp_path: Path, recorded: Recorded, form: Fp8 | None
) -> None:
    rng = random.Random(1)
    use_for_a_while(recorded.root, rng, form)
    assert len(recorded.moments) > 60
    [about] = recorded.root.rglob("about.json")
    part = os.path.relpath(about.parent, recorded.root)
    after, num_found = tmp_path / "after", 0
    for kept, loose in list(recorded.moments):
        for left in losses(loose, rng):
            image = dict(kept)
            for path, at, data in left:
                image[path] = _written(image.get(path, b""), at, data)
            restore(after, part, image)
            num_found += check_whole(after, form)
    assert num_found > 500, "a test that finds nothing shows nothing"


def restore(folder: Path, part: str, image: dict[str, bytes]) -> None:
    (folder / part).mkdir(parents=True, exist_ok=True)
    for path in (folder / part).iterdir():
        path.unlink()
    for name, data in image.items():
        (folder / name).write_bytes(data)


def check_whole(folder: Path, form: Fp8 | None) -> int:
    files = DiskFiles(folder, SHAPE, NUM_SLOTS, form)
    memory, blocks_there = SlotMemory(SHAPE, NUM_SLOTS), DiskBlocks(files)
    try:
        found = files.recover()
        if not found:
            return 0
        places = np.arange(len(found), dtype=np.int64)
        slots, keys = [each.slot for each in found], [each.block.key for each in found]
        came = blocks_there.read(keys, [each.checksum for each in found], slots, memory, places)
        assert memory.checksums(places, keys).tolist() == came
        for place, each in enumerate(found):
            with memory.block(place) as view:
                data = contents(each.block)
                assert view == (data if form is None else in_eight_bits(data, SHAPE))
        return len(found)
    finally:
        blocks_there.close()
        memory.close()
        files.close()
