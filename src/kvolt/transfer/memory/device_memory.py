"""DeviceMemory: memory of an accelerator as transfers see it, and pieces moved between any two memories. No torch.

A device moves pieces itself, from and to its own memory, and sums them as it does. Calls come back when all is done:
what is asked for at a time is small, and a transfer that is stopped between two of them has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.transfer.memory import block_bytes

if TYPE_CHECKING:
    from kvolt.transfer.memory.slabs import Pieces

Sums = npt.NDArray[np.uint64]

MOST_PIECES = 1 << 18
"""Moved at a time, however small they are: the host has work with each."""
DEVICE_TURN_BYTES = 1 << 30
"""Moved at a time between memories of devices: a millisecond on one device, some tens over PCIe."""


class DeviceHandle(msgspec.Struct, frozen=True):
    """By which another process of the host opens a device's memory."""

    allocation: bytes
    """Opaque: what the driver calls the allocation that the memory lies in."""
    offset: int
    """Of the memory in it."""
    num_bytes: int


class DeviceMemory(Protocol):
    """See the module. For one thread at a time. ValueError from any call that is refused: nothing has moved then;
    TransferFailed where the device failed."""

    @property
    def name(self) -> str:
        """Of the device: the same for all processes of the host."""
        ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where it begins, as this process knows it."""
        ...

    @property
    def ordinal(self) -> int | None:
        """The number of the device in this process; None where it is the host's memory in truth, as tests have it."""
        ...

    @property
    def numa_node(self) -> int | None:
        """The part of the host's memory that is nearest to it; None where there are no parts, or it is not known."""
        ...

    @property
    def handle(self) -> DeviceHandle | None:
        """For peers; None where there is none."""
        ...

    def open(self, handle: DeviceHandle) -> DeviceMemory:
        """A peer's memory, to be read from into this one. Unsupported where the device cannot reach it."""
        ...

    def close(self) -> None:
        """Give back what was opened for it. Nothing may be under way."""
        ...

    def staging(self, num_bytes: int) -> memoryview:
        """New memory of the host that pieces come to, or go from, fast."""
        ...

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Make memory of the host such, until what this gives is called. Nothing, where the device cannot."""
        ...

    def for_thread(self) -> DeviceMemory:
        """The same memory, for another thread. To be closed before this one."""
        ...

    def move(self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None) -> Sums:
        """As `bytes_python.copy_checked`; one of the two memories is this, the other any of this process."""
        ...

    def checksums(self, pieces: Pieces, seeds: bytes | None) -> Sums:
        """Of blocks that stay where they are."""
        ...


Memory = memoryview | DeviceMemory


def copy_checked(
    dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None, sums: Sums
) -> None:
    """As `bytes_python.copy_checked`, whatever the two memories are."""
    if isinstance(dst, memoryview) and isinstance(src, memoryview):
        block_bytes.copy_checked(
            dst, into.offsets, src, origin.offsets, into.piece_bytes, into.per_block, seeds, sums
        )
    else:
        mover = src if isinstance(dst, memoryview) else dst
        assert not isinstance(mover, memoryview)
        sums[:] = mover.move(dst, into, src, origin, seeds)


def copy(dst: Memory, into: Pieces, src: Memory, origin: Pieces) -> None:
    """Likewise, without checksums. A device, which has them for nothing, sums all the same."""
    if isinstance(dst, memoryview) and isinstance(src, memoryview):
        block_bytes.copy(dst, into.offsets, src, origin.offsets, into.piece_bytes)
    else:
        copy_checked(dst, into, src, origin, None, np.empty(into.num_blocks, dtype=np.uint64))


def checksums(memory: Memory, pieces: Pieces, seeds: bytes | None, sums: Sums) -> None:
    """As `bytes_python.checksums`."""
    if isinstance(memory, memoryview):
        block_bytes.checksums(memory, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds, sums)
    else:
        sums[:] = memory.checksums(pieces, seeds)


def blocks_at_once(dst: Memory, src: Memory, pieces: Pieces, most_bytes: int) -> int:
    """How many are moved before others have their turn; `most_bytes`: where the host's memory is in it."""
    if not isinstance(dst, memoryview) and not isinstance(src, memoryview):
        most_bytes = DEVICE_TURN_BYTES
    return max(min(most_bytes // pieces.bytes_per_block, MOST_PIECES // pieces.per_block), 1)
