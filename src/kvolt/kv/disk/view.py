"""DiskView: a disk tier's folder as somebody else sees it, whoever owns it. Reads only, but for `evict`.

Of a folder that a worker is writing to it is a look at one moment: a block that is replaced meanwhile may not verify,
which `is_owned` explains. Synchronous.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError, Unavailable
from kvolt.core.ids import BlockKey
from kvolt.kv.disk.files import About, file_of, slots_per_file
from kvolt.kv.disk.fp8 import EightBits
from kvolt.kv.disk.journal import FORMAT, Journal, Written, read_journal
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.runtime.plane.wire import MALFORMED

_AT_ONCE, _AT_ONCE_BYTES = 64, 64 << 20
_ALL_SLOTS = 1 << 40


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One owner's blocks."""

    folder: Path
    shape: BlockShape
    blocks: tuple[Written, ...]
    is_owned: bool
    """Whether a process has it now."""
    num_slots: int
    form: EightBits | None = None
    """In which blocks lie there, where it is not the engine's."""

    @property
    def num_bytes(self) -> int:
        return len(self.blocks) * self.shape.block_bytes


def parts_in(folder: Path) -> list[Part]:
    """ConfigError for a folder without any."""
    found = [_part(about.parent) for about in sorted(folder.glob("**/about.json"))]
    if not found:
        raise ConfigError(
            f"no KV is kept in {folder}",
            key="dir",
            remedy="name the folder that --kv-disk-dir had",
        )
    return found


def _part(folder: Path) -> Part:
    try:
        about = msgspec.json.decode((folder / "about.json").read_bytes(), type=About)
        blocks = read_journal(folder, _ALL_SLOTS)
    except (OSError, *MALFORMED) as error:
        raise ConfigError(
            f"{folder} cannot be read: {error}", key="dir", remedy="remove it: nothing in it is the only copy"
        ) from None
    if about.format != FORMAT:
        raise ConfigError(
            f"{folder} was written by another version (format {about.format}, this is {FORMAT})",
            key="dir",
            remedy="remove it: nothing in it is the only copy",
        )
    form = EightBits.named(about.form)
    if about.form and form is None:
        raise ConfigError(
            f"{folder} was written by another version (blocks of the form {about.form})",
            key="dir",
            remedy="remove it: nothing in it is the only copy",
        )
    shape = BlockShape(about.piece_bytes, about.num_ranks)
    return Part(
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
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def read_blocks(part: Part, blocks: Sequence[Written]) -> Iterator[tuple[Written, bytes | None]]:
    """Each with its bytes as they lie there; None where they are not what was written, or cannot be read."""
    size = part.shape.slot_bytes
    at_once = max(min(_AT_ONCE, _AT_ONCE_BYTES // size), 1)
    memory = SlotMemory(part.shape, at_once)
    per_file = slots_per_file(part.shape)
    try:
        for start in range(0, len(blocks), at_once):
            some = blocks[start : start + at_once]
            places = np.arange(len(some), dtype=np.int64)
            [(home, _, _)] = memory.by_part(places)
            for index, each in enumerate(some):
                with home.memory[index * size : (index + 1) * size] as view:
                    view[:] = bytes(size)
                    with (
                        contextlib.suppress(OSError),
                        open(file_of(part.folder, each.slot // per_file), "rb", buffering=0) as file,
                    ):
                        os.preadv(file.fileno(), [view], (each.slot % per_file) * size)
            sums = memory.checksums(places, [each.block.key for each in some]).tolist()
            for index, (each, found) in enumerate(zip(some, sums, strict=True)):
                is_good = found == each.checksum
                data = bytes(home.memory[index * size : index * size + part.shape.block_bytes])
                yield each, data if is_good else None
    finally:
        memory.close()


def engines_bytes(part: Part, data: bytes) -> bytes:
    """Of what lies there, what an engine would get."""
    if part.form is None:
        return data
    packed, memory = SlotMemory(part.shape, 1), SlotMemory(part.form.unpacked(part.shape), 1)
    try:
        with packed.block(0) as view:
            view[:] = data
        only = np.zeros(1, dtype=np.int64)
        part.form.decode(packed, only, memory, only)
        with memory.block(0) as view:
            return bytes(view)
    finally:
        packed.close()
        memory.close()


def verify(part: Part, progress: Callable[[int], None]) -> list[BlockKey]:
    """Keys of blocks that are not what was written."""
    bad: list[BlockKey] = []
    for number, (each, data) in enumerate(read_blocks(part, part.blocks), 1):
        if data is None:
            bad.append(each.block.key)
        progress(number)
    return bad


def evict(part: Part, keys: Sequence[BlockKey]) -> int:
    """Forget these; how many. Unavailable while a process has the folder."""
    lock = os.open(part.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"a running worker has {part.folder}",
                reason="owned",
                remedy="stop it, or POST /clear_kv_blocks to the frontend's admin port",
            ) from None
        journal = Journal(part.folder)
        try:
            wanted = set(keys)
            gone = [each.slot for each in journal.recover(_ALL_SLOTS) if each.block.key in wanted]
            journal.remove(gone)
        finally:
            journal.close()
    finally:
        os.close(lock)
    return len(gone)
