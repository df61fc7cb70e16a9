"""A device that is none: memory of this process behind the port that memory of an accelerator has."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np

from kvolt.core.errors import TransferFailed, Unsupported
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.device_memory import DeviceHandle, Memory
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.paths.capabilities import MachineFacts

WITH_GPU = MachineFacts(num_gpus=1, has_torch=True)


class FakeDevice:
    """One memory of it. Those that were made here can open each other by their handles."""

    made: dict[bytes, FakeDevice] = {}  # noqa: RUF012

    def __init__(self, num_bytes: int, seed: int = 0, *, is_shared: bool = True) -> None:
        self.name = "GPU-0"
        self.num_bytes = num_bytes
        self.bytes = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        self.handle: DeviceHandle | None = None
        if is_shared:
            self.handle = DeviceHandle(secrets.token_bytes(8), 0, num_bytes)
            self.made[self.handle.allocation] = self
        self.opens = True
        self.breaks = False
        """What is moved to it is not what was read."""
        self.fails = False
        self.open_fails = False
        self.on_move: Callable[[], object] = lambda: None
        self.num_opened = 0
        self.num_closed = 0

    def rows(self, block_bytes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return self.bytes.reshape(-1, block_bytes)

    def slab(self, block_bytes: int) -> Slab:
        return Slab.on_device(self, block_bytes)

    def open(self, handle: DeviceHandle) -> FakeDevice:
        self.num_opened += 1
        if self.open_fails:
            raise TransferFailed("out of memory", reason="device")
        if not self.opens:
            raise Unsupported("not from here", feature="cuda-ipc")
        return self.made[handle.allocation]

    def close(self) -> None:
        self.num_closed += 1

    def staging(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def move(self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None) -> Sums:
        assert self in (dst, src)
        self._fail()
        self.on_move()
        sums = np.empty(into.num_blocks, dtype=np.uint64)
        device_memory.copy_checked(_view(dst), into, _view(src), origin, seeds, sums)
        if self.breaks and dst is self:
            self.bytes[into.offsets[0]] ^= 1
            return self.checksums(into, seeds)
        return sums

    def checksums(self, pieces: Pieces, seeds: bytes | None) -> Sums:
        self._fail()
        sums = np.empty(pieces.num_blocks, dtype=np.uint64)
        device_memory.checksums(_view(self), pieces, seeds, sums)
        return sums

    def _fail(self) -> None:
        if self.fails:
            raise TransferFailed("out of memory", reason="device")


def _view(memory: Memory) -> memoryview:
    if isinstance(memory, memoryview):
        return memory
    assert isinstance(memory, FakeDevice)
    return memoryview(memory.bytes)  # type: ignore[arg-type]
