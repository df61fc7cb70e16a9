"""Slab: memory registered once as adjacent equal blocks.

Owns the kind of memory and the location of blocks. Blocks are numbers in arrays; there is no object per block. Knows no
peer and no path.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.errors import InvalidRequest
from kvolt.transfer.memory.device_memory import DeviceMemory, Memory, MemoryKind
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.populate import populate

_FINAL_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x0010
"""F_SEAL_FUTURE_WRITE: only existing mappings may write. Since Linux 5.1."""

_MAX_NAME_CHARS = 128
_WORD_BYTES = 8

Numbers = npt.NDArray[np.int64]
"""Block numbers or byte offsets."""


class SlabInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Description of a slab for peers."""

    number: int
    kind: MemoryKind
    block_bytes: int
    num_blocks: int
    layout: SlabLayout | None = None
    """KV layout; None for other data."""
    device: str | None = None
    """Device name of device memory."""

    def __post_init__(self) -> None:
        if (self.device is not None) != (self.kind is MemoryKind.DEVICE):
            raise ValueError(f"{self.kind} memory of device {self.device}: only device memory names a device")
        if self.device is not None and len(self.device) > _MAX_NAME_CHARS:
            raise ValueError(f"a device name has at most {_MAX_NAME_CHARS} characters")


def map_for_reading(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a peer's memory. ValueError if it could shrink, since reading truncated memory kills the process."""
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the memory size is not sealed")
    return mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)


class Slab:
    """See the module. Only the process that registered a slab writes to its blocks."""

    def __init__(
        self,
        memory: memoryview,
        block_bytes: int,
        kind: MemoryKind = MemoryKind.HOST,
        *,
        descriptor: int | None = None,
        layout: SlabLayout | None = None,
    ) -> None:
        """`descriptor`: of the same memory, for peers to map. Trailing bytes after the last whole block are unused."""
        if not 0 < block_bytes <= memory.nbytes:
            raise InvalidRequest(
                f"{memory.nbytes} bytes of memory cannot hold a block of {block_bytes}", param="block_bytes"
            )
        self._init(memory.cast("B"), memory.nbytes // block_bytes, block_bytes, kind, descriptor, layout)

    def _init(
        self,
        memory: memoryview,
        num_blocks: int,
        block_bytes: int,
        kind: MemoryKind,
        descriptor: int | None,
        layout: SlabLayout | None,
    ) -> None:
        self.memory = memory
        """Empty for device memory."""
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
        """Allocate pre-faulted memory that other processes of this host can map. `close` frees it.

        `node`: preferred NUMA node.
        """
        descriptor = os.memfd_create("kvolt-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_blocks * block_bytes)
            slab = cls.mapped(descriptor, num_blocks * block_bytes, block_bytes, layout)
            with contextlib.suppress(
                OSError
            ):  # old kernel: peers, of the same user, are trusted not to write
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
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
        """Map shared memory by its descriptor and take ownership of that. The size is sealed."""
        with contextlib.suppress(OSError):  # peers refuse to map unsealed memory
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FINAL_SIZE)
        mapped = mmap.mmap(descriptor, num_bytes)
        slab = cls(memoryview(mapped), block_bytes, MemoryKind.SHARED, descriptor=descriptor, layout=layout)
        slab._map = mapped
        return slab

    @classmethod
    def on_device(cls, memory: DeviceMemory, block_bytes: int, layout: SlabLayout | None = None) -> Self:
        """Slab over device memory. `close` also closes the device memory."""
        if not 0 < block_bytes <= memory.num_bytes:
            raise InvalidRequest(
                f"{memory.num_bytes} bytes of memory cannot hold a block of {block_bytes}",
                param="block_bytes",
            )
        if block_bytes % _WORD_BYTES:
            raise InvalidRequest(
                f"block size {block_bytes} must be a multiple of {_WORD_BYTES} bytes for device memory",
                param="block_bytes",
            )
        slab = cls.__new__(cls)
        num_blocks = memory.num_bytes // block_bytes
        slab._init(memoryview(b""), num_blocks, block_bytes, MemoryKind.DEVICE, None, layout)
        slab.device = memory
        return slab

    def for_thread(self) -> Slab:
        """The same blocks for use by another thread. Must not outlive this slab."""
        if self.device is None:
            return self
        return Slab.on_device(self.device.for_thread(), self.block_bytes, self.layout)

    @property
    def contents(self) -> Memory:
        """Memory that contains the blocks."""
        return self.memory if self.device is None else self.device

    def read_only(self) -> int | None:
        """Read-only descriptor of the memory for peers; None if unavailable."""
        if self._read_only is None and self.descriptor is not None:
            with contextlib.suppress(OSError):  # no /proc
                self._read_only = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        return self._read_only

    def close(self) -> None:
        """Release what `shared`, `mapped` or `on_device` acquired. No operation may be in flight."""
        if self.device is not None:
            self.device.close()
        if self._map is None:
            return
        self.memory.release()
        with contextlib.suppress(BufferError):  # still exported: unmapped with the last view
            self._map.close()
        self._map = None
        for descriptor in (self.descriptor, self._read_only):
            if descriptor is not None:
                os.close(descriptor)
        self.descriptor = self._read_only = None

    def numbers(self, blocks: Sequence[int] | Numbers) -> Numbers:
        """Block numbers as a checked array. InvalidRequest if out of range."""
        numbers = np.ascontiguousarray(blocks, dtype=np.int64)
        if numbers.ndim != 1:
            raise InvalidRequest("blocks must be a one-dimensional sequence of numbers", param="blocks")
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= self.num_blocks):
            raise InvalidRequest(
                f"block number out of range: the slab has {self.num_blocks} blocks", param="blocks"
            )
        return numbers

    def are_unique(self, numbers: Numbers) -> bool:
        """Whether no block is named twice. Uses a mask, a hundred times faster than sorting."""
        is_seen = np.zeros(self.num_blocks, dtype=bool)
        is_seen[numbers] = True
        return int(is_seen.sum()) == len(numbers)

    def pieces(self, numbers: Numbers, inside: Numbers | None = None, piece_bytes: int = 0) -> Pieces:
        """Pieces of these blocks at the offsets `inside` each block; None: whole blocks."""
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
