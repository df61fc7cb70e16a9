"""Slabs: memory that blocks travel from and to, registered once as equal blocks side by side.

Owns what a memory is and where its blocks lie. Blocks are numbers in arrays; there is no object for a block. Knows no
peer and no path.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.transfer.memory.device_memory import DeviceMemory, Memory
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.populate import populate
from kvolt.transfer.paths.lanes import MemoryKind

_FINAL_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NO_MORE_WRITERS = 0x0010
"""F_SEAL_FUTURE_WRITE: who has mapped it writes to it, and nobody else ever will. Since Linux 5.1."""

_MOST_NAME_CHARS = 128
_WORD_BYTES = 8

Numbers = npt.NDArray[np.int64]
"""Of blocks, or offsets in bytes."""


class SlabInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A slab as peers know it."""

    number: int
    kind: MemoryKind
    block_bytes: int
    num_blocks: int
    layout: SlabLayout | None = None
    """Where blocks are KV; None for bytes of any other meaning."""
    device: str | None = None
    """The name of the device whose memory it is."""

    def __post_init__(self) -> None:
        if (self.device is not None) != (self.kind is MemoryKind.DEVICE):
            raise ValueError(
                f"{self.kind} memory of device {self.device}: a device's, and no other, has a name"
            )
        if self.device is not None and len(self.device) > _MOST_NAME_CHARS:
            raise ValueError(f"a device's name has {_MOST_NAME_CHARS} characters at most")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where blocks lie in a memory: equal pieces, all of one block before those of the next. Usually one to a block."""

    offsets: Numbers
    piece_bytes: int
    per_block: int = 1

    @property
    def num_blocks(self) -> int:
        return len(self.offsets) // self.per_block

    @property
    def bytes_per_block(self) -> int:
        return self.piece_bytes * self.per_block

    def in_row(self) -> Pieces:
        """The same ones side by side, from the start of a memory on."""
        offsets = np.arange(len(self.offsets), dtype=np.int64) * self.piece_bytes
        return Pieces(offsets, self.piece_bytes, self.per_block)

    def part(self, first: int, count: int) -> Pieces:
        """Of so many blocks."""
        start, end = first * self.per_block, (first + count) * self.per_block
        return Pieces(self.offsets[start:end], self.piece_bytes, self.per_block)


def are_apart(numbers: Numbers, end: int) -> bool:
    """Whether each of these, all from 0 to `end`, is there once. A mask: to sort takes a hundred times as long."""
    is_there = np.zeros(end, dtype=bool)
    is_there[numbers] = True
    return int(is_there.sum()) == len(numbers)


def map_for_reading(descriptor: int, num_bytes: int) -> mmap.mmap:
    """A peer's memory. ValueError for one that could shrink: who reads what is not there any more is killed."""
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("its size is not sealed")
    return mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)


class Slab:
    """See the module. Blocks of a slab are written by the process that registered it, and by nobody else."""

    def __init__(
        self,
        memory: memoryview,
        block_bytes: int,
        kind: MemoryKind = MemoryKind.HOST,
        *,
        descriptor: int | None = None,
        layout: SlabLayout | None = None,
    ) -> None:
        """`descriptor`: of the same memory, for others to map. Bytes that are no whole block are left alone."""
        if not 0 < block_bytes <= memory.nbytes:
            raise InvalidRequest(
                f"{memory.nbytes} bytes of memory hold no block of {block_bytes}", param="block_bytes"
            )
        self._set(memory.cast("B"), memory.nbytes // block_bytes, block_bytes, kind, descriptor, layout)

    def _set(
        self,
        memory: memoryview,
        num_blocks: int,
        block_bytes: int,
        kind: MemoryKind,
        descriptor: int | None,
        layout: SlabLayout | None,
    ) -> None:
        self.memory = memory
        """Empty for a file, and for a device's."""
        self.device: DeviceMemory | None = None
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.kind = kind
        self.descriptor = descriptor
        self.layout = layout
        self._map: mmap.mmap | None = None
        self._read_only: int | None = None

    @classmethod
    def shared(
        cls, num_blocks: int, block_bytes: int, layout: SlabLayout | None = None, *, node: int | None = None
    ) -> Self:
        """New memory that other processes of this host can map, all of it there at once. `close` gives it back.
        `node`: the NUMA node that it should be on."""
        descriptor = os.memfd_create("kvolt-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_blocks * block_bytes)
            slab = cls.mapped(descriptor, num_blocks * block_bytes, block_bytes, layout)
            with contextlib.suppress(OSError):  # an old kernel: peers, of the same user, keep to it without
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _NO_MORE_WRITERS)
            assert slab._map is not None
            populate(slab._map, node)
            return slab
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def mapped(
        cls, descriptor: int, num_bytes: int, block_bytes: int, layout: SlabLayout | None = None
    ) -> Self:
        """Of a memory that others can map, by its descriptor, which is the slab's from now on. Its size is final."""
        with contextlib.suppress(OSError):  # one that cannot be sealed is refused by who would map it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FINAL_SIZE)
        mapped = mmap.mmap(descriptor, num_bytes)
        slab = cls(memoryview(mapped), block_bytes, MemoryKind.SHARED, descriptor=descriptor, layout=layout)
        slab._map = mapped
        return slab

    @classmethod
    def of_file(
        cls, path: str | os.PathLike[str], num_blocks: int, block_bytes: int, layout: SlabLayout | None = None
    ) -> Self:
        """Blocks that lie in a file, which is made, or grows, where it must. `close` closes it; the file stays."""
        if num_blocks < 1 or block_bytes < 1:
            raise InvalidRequest(
                f"{num_blocks} blocks of {block_bytes} bytes are no slab", param="num_blocks"
            )
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size < num_blocks * block_bytes:
                    os.ftruncate(descriptor, num_blocks * block_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{num_blocks} blocks of {block_bytes} bytes cannot be kept in {os.fspath(path)}: {error}",
                key="path",
                remedy="name a file that this process may write to, where there is room",
            ) from None
        slab = cls.__new__(cls)
        slab._set(memoryview(b""), num_blocks, block_bytes, MemoryKind.FILE, descriptor, layout)
        return slab

    @classmethod
    def on_device(cls, memory: DeviceMemory, block_bytes: int, layout: SlabLayout | None = None) -> Self:
        """Of a device's memory. `close` closes that, too."""
        if not 0 < block_bytes <= memory.num_bytes:
            raise InvalidRequest(
                f"{memory.num_bytes} bytes of memory hold no block of {block_bytes}", param="block_bytes"
            )
        if block_bytes % _WORD_BYTES:
            raise InvalidRequest(
                f"blocks of {block_bytes} bytes: a device moves multiples of {_WORD_BYTES}",
                param="block_bytes",
            )
        slab = cls.__new__(cls)
        num_blocks = memory.num_bytes // block_bytes
        slab._set(memoryview(b""), num_blocks, block_bytes, MemoryKind.DEVICE, None, layout)
        slab.device = memory
        return slab

    def for_thread(self) -> Slab:
        """The same blocks, for another thread than the one that this is moved by. To be used no longer than this."""
        if self.device is None:
            return self
        return Slab.on_device(self.device.for_thread(), self.block_bytes, self.layout)

    @property
    def contents(self) -> Memory:
        """Where blocks lie, whatever memory that is but a file."""
        return self.memory if self.device is None else self.device

    def read_only(self) -> int | None:
        """A descriptor of the same memory that cannot be written through, for peers; None where there is none."""
        if self._read_only is None and self.descriptor is not None:
            with contextlib.suppress(OSError):  # no /proc
                self._read_only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        return self._read_only

    def close(self) -> None:
        """Give back what `shared`, `mapped`, `of_file` or `on_device` has taken. Nothing may be under way."""
        if self.device is not None:
            self.device.close()
        if self._map is None and self.kind is not MemoryKind.FILE:
            return
        self.memory.release()
        if self._map is not None:
            with contextlib.suppress(
                BufferError
            ):  # the mapping ends with its last view, in a traceback for example
                self._map.close()
            self._map = None
        for descriptor in (self.descriptor, self._read_only):
            if descriptor is not None:
                os.close(descriptor)
        self.descriptor = self._read_only = None

    def numbers(self, blocks: Sequence[int] | Numbers) -> Numbers:
        """Of blocks, as an array. InvalidRequest where there is no such block."""
        numbers = np.ascontiguousarray(blocks, dtype=np.int64)
        if numbers.ndim != 1:
            raise InvalidRequest("blocks are a row of numbers", param="blocks")
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.num_blocks):
            raise InvalidRequest(f"a slab of {self.num_blocks} blocks has no such block", param="blocks")
        return numbers

    def are_apart(self, numbers: Numbers) -> bool:
        """Whether each is named once."""
        return are_apart(numbers, self.num_blocks)

    def pieces(self, numbers: Numbers, inside: Numbers | None = None, piece_bytes: int = 0) -> Pieces:
        """Of these blocks; `inside` each only the pieces at these offsets, whole ones where it is None."""
        offsets = numbers * self.block_bytes
        if inside is None:
            return Pieces(offsets, self.block_bytes)
        return Pieces((offsets[:, None] + inside[None, :]).ravel(), piece_bytes, len(inside))

    def info(self, number: int) -> SlabInfo:
        return SlabInfo(
            number=number,
            kind=self.kind,
            block_bytes=self.block_bytes,
            num_blocks=self.num_blocks,
            layout=self.layout,
            device=None if self.device is None else self.device.name,
        )
