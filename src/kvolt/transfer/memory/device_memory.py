"""DeviceMemory: accelerator memory as seen by transfers, and copies between any two memories. Without torch.

A device copies pieces from and to its own memory and computes their checksums on the way. Calls are synchronous and
small, so a transfer that is stopped between two calls has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np

from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.pieces import Pieces, Sums

MAX_PIECES = 1 << 18
"""Pieces per step: the host has work per piece."""
DEVICE_STEP_BYTES = 1 << 30
"""Bytes per step between devices: a millisecond on one device, tens of milliseconds over PCIe."""


class MemoryKind(StrEnum):
    HOST = "host"
    """Private pageable memory of one process."""
    SHARED = "shared"
    """Mappable by other processes of the host through its descriptor."""
    PINNED = "pinned"
    """Shared and page-locked for CUDA."""
    DEVICE = "device"


class DeviceHandle(msgspec.Struct, frozen=True):
    """Handle with which another process of the host opens device memory."""

    allocation: bytes
    """Opaque driver handle of the allocation that contains the memory."""
    offset: int
    """Offset of the memory in the allocation."""
    num_bytes: int


class DeviceMemory(Protocol):
    """See the module. One thread at a time. A rejected call raises ValueError and has moved nothing; TransferFailed if
    the device failed."""

    @property
    def name(self) -> str:
        """Device name, equal in all processes of the host."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Start address in this process."""
        ...

    @property
    def ordinal(self) -> int | None:
        """Device number in this process; None for host memory that stands in for a device in tests."""
        ...

    @property
    def numa_node(self) -> int | None:
        """Nearest NUMA node; None with a single node or if unknown."""
        ...

    @property
    def handle(self) -> DeviceHandle | None:
        """Handle for peers; None if the memory cannot be shared."""
        ...

    def open(self, handle: DeviceHandle) -> DeviceMemory:
        """Open a peer's memory as a source for reads. Unsupported if the device cannot access it."""
        ...

    def close(self) -> None:
        """Release what was opened. No operation may be in flight."""
        ...

    def staging(self, num_bytes: int) -> memoryview:
        """Allocate host memory with fast copies from and to the device."""
        ...

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Pin host memory and return the function that unpins it. No-op if the device does not support it."""
        ...

    def for_thread(self) -> DeviceMemory:
        """The same memory for another thread. Must be closed before this one."""
        ...

    def move(self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None) -> Sums:
        """Like `block_bytes_python.copy_checked`; one memory is this one, the other any memory of this process."""
        ...

    def checksums(self, pieces: Pieces, seeds: bytes | None) -> Sums:
        """Checksums of blocks in this memory."""
        ...


Memory = memoryview | DeviceMemory


def copy_checked(
    dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None, sums: Sums
) -> None:
    """Like `block_bytes_python.copy_checked`, for any two memories."""
    if isinstance(dst, memoryview) and isinstance(src, memoryview):
        block_bytes.copy_checked(
            dst, into.offsets, src, origin.offsets, into.piece_bytes, into.per_block, seeds, sums
        )
    else:
        mover = src if isinstance(dst, memoryview) else dst
        assert not isinstance(mover, memoryview)
        sums[:] = mover.move(dst, into, src, origin, seeds)


def copy(dst: Memory, into: Pieces, src: Memory, origin: Pieces) -> None:
    """Copy without checksums. A device computes them anyway, at no cost."""
    if isinstance(dst, memoryview) and isinstance(src, memoryview):
        block_bytes.copy(dst, into.offsets, src, origin.offsets, into.piece_bytes)
    else:
        copy_checked(dst, into, src, origin, None, np.empty(into.num_blocks, dtype=np.uint64))


def checksums(memory: Memory, pieces: Pieces, seeds: bytes | None, sums: Sums) -> None:
    """Like `block_bytes_python.checksums`, for any memory."""
    if isinstance(memory, memoryview):
        block_bytes.checksums(memory, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds, sums)
    else:
        sums[:] = memory.checksums(pieces, seeds)


def blocks_per_step(dst: Memory, src: Memory, pieces: Pieces, max_bytes: int) -> int:
    """Blocks per step; `max_bytes` applies if host memory is involved."""
    if not isinstance(dst, memoryview) and not isinstance(src, memoryview):
        max_bytes = DEVICE_STEP_BYTES
    return max(min(max_bytes // pieces.bytes_per_block, MAX_PIECES // pieces.per_block), 1)
