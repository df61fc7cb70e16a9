"""Staging: host buffers for blocks of files or devices that are sent over a socket, one part at a time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvolt.core.errors import TransferFailed
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.paths.file_path import read_file


class Staging:
    """See the module."""

    def __init__(self) -> None:
        self._plain = memoryview(b"")
        self._of_device: WeakKeyDictionary[DeviceMemory, memoryview] = WeakKeyDictionary()
        """Pinned buffer per device."""

    def fill(self, slab: Slab, pieces: Pieces) -> tuple[memoryview, Pieces]:
        """Copy blocks into the buffer contiguously. Valid until the next call. TransferFailed on errors."""
        num_bytes = pieces.num_blocks * pieces.bytes_per_block
        packed = pieces.contiguous()
        if slab.device is None:
            if len(self._plain) < num_bytes:
                self._plain = memoryview(bytearray(num_bytes))
            read_file(slab, pieces, self._plain, packed.offsets)
            return self._plain, packed
        try:
            memory = self._pinned(slab.device, num_bytes)
            slab.device.move(memory, packed, slab.device, pieces, None)
        except ValueError as error:
            raise TransferFailed(
                f"cannot copy device blocks: {error}", path="cuda-copy", reason="device"
            ) from None
        return memory, packed

    def _pinned(self, device: DeviceMemory, num_bytes: int) -> memoryview:
        memory = self._of_device.get(device)
        if memory is None or len(memory) < num_bytes:
            memory = self._of_device[device] = device.staging(num_bytes)
        return memory
