"""DiskView: inspects the folder of a disk tier without owning it. Read-only except for `evict`. Synchronous.

If a worker is writing to the folder (`is_owned`), the view is a snapshot, and a block that is replaced may fail to
verify.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvolt.core.errors import MALFORMED, ConfigError, Unavailable
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import About, file_of, is_locked, slots_per_file
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.journal import FORMAT, Journal, SlotRecord, read_journal
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory

_BATCH_BLOCKS, _BATCH_BYTES = 64, 64 << 20
_ALL_SLOTS = 1 << 40


class DiskPart(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one owner."""

    folder: Path
    shape: BlockShape
    blocks: tuple[SlotRecord, ...]
    is_owned: bool
    """Whether a process owns it now."""
    num_slots: int
    form: Fp8 | None = None
    """Stored format; None: as in the engine."""

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.shape.block_bytes


def find_parts(folder: Path) -> list[DiskPart]:
    """Find the parts of a folder. ConfigError if there are none."""
    parts = [_part(about.parent) for about in sorted(folder.glob("**/about.json"))]
    if not parts:
        raise ConfigError(
            f"no KV blocks in {folder}",
            key="dir",
            remedy="use the folder of --kv-disk-dir",
        )
    return parts


def _part(folder: Path) -> DiskPart:
    try:
        about = msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
        blocks = read_journal(folder, _ALL_SLOTS)
    except (OSError, *MALFORMED) as error:
        raise ConfigError(
            f"cannot read {folder}: {error}", key="dir", remedy="remove it: it holds only cached data"
        ) from None
    form = Fp8.named(about.form)
    other = ""
    if about.format != FORMAT:
        other = f"format {about.format}, this is {FORMAT}"
    elif about.form and form is None:
        other = f"block format {about.form}"
    if other:
        raise ConfigError(
            f"{folder} was written by another version ({other})",
            key="dir",
            remedy="remove it: it holds only cached data",
        )
    shape = BlockShape(about.piece_bytes, about.num_ranks)
    return DiskPart(
        folder=folder,
        shape=shape,
        blocks=tuple(blocks),
        is_owned=_is_owned(folder),
        num_slots=about.num_slots,
        form=form,
    )


def _is_owned(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_locked(lock)
    finally:
        os.close(lock)


def read_blocks(part: DiskPart, blocks: Sequence[SlotRecord]) -> Iterator[tuple[SlotRecord, bytes | None]]:
    """Yield each block with its stored bytes; None if corrupt or unreadable."""
    size = part.shape.slot_bytes
    batch_blocks = max(min(_BATCH_BLOCKS, _BATCH_BYTES // size), 1)
    memory = SlotMemory(part.shape, batch_blocks)
    per_file = slots_per_file(part.shape)
    try:
        for start in range(0, len(blocks), batch_blocks):
            batch = blocks[start : start + batch_blocks]
            slots = np.arange(len(batch), dtype=np.int64)
            [(part_memory, _, _)] = memory.by_part(slots)
            for index, each in enumerate(batch):
                with part_memory.memory[index * size : (index + 1) * size] as view:
                    view[:] = bytes(size)
                    with (
                        contextlib.suppress(OSError),
                        open(file_of(part.folder, each.slot // per_file), "rb", buffering=0) as file,
                    ):
                        os.preadv(file.fileno(), [view], (each.slot % per_file) * size)
            sums = memory.checksums(slots, [each.block.key for each in batch]).tolist()
            for index, (each, checksum) in enumerate(zip(batch, sums, strict=True)):
                is_good = checksum == each.checksum
                data = bytes(part_memory.memory[index * size : index * size + part.shape.block_bytes])
                yield each, data if is_good else None
    finally:
        memory.close()


def decode_block(part: DiskPart, data: bytes) -> bytes:
    """Stored bytes decoded to the engine's format."""
    if part.form is None:
        return data
    packed, memory = SlotMemory(part.shape, 1), SlotMemory(part.form.unpacked(part.shape), 1)
    try:
        with packed.block(0) as view:
            view[:] = data
        slot = np.zeros(1, dtype=np.int64)
        part.form.decode(packed, slot, memory, slot)
        with memory.block(0) as view:
            return bytes(view)
    finally:
        packed.close()
        memory.close()


def verify(part: DiskPart, progress: Callable[[int], None]) -> list[BlockKey]:
    """Keys of corrupt blocks; `progress` gets the number of verified ones."""
    corrupt: list[BlockKey] = []
    for number, (each, data) in enumerate(read_blocks(part, part.blocks), 1):
        if data is None:
            corrupt.append(each.block.key)
        progress(number)
    return corrupt


def evict(part: DiskPart, keys: Sequence[BlockKey]) -> int:
    """Remove these blocks; return how many. Unavailable while a process owns the folder."""
    lock = os.open(part.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if is_locked(lock):
            raise Unavailable(
                f"a running worker owns {part.folder}",
                reason="owned",
                remedy="stop it, or POST /clear_kv_blocks to the frontend's admin port",
            )
        journal = Journal(part.folder)
        try:
            evicted = set(keys)
            freed = [each.slot for each in journal.recover(_ALL_SLOTS) if each.block.key in evicted]
            journal.remove(freed)
        finally:
            journal.close()
    finally:
        os.close(lock)
    return len(freed)
