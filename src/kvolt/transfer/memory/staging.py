"""Staging: pinned host buffers for blocks of devices that are sent over a socket, one part at a time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvolt.core.errors import TransferFailed
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.pieces import Pieces


class Staging:
    """See the module."""

    def __init__(self) -> None:
        self._buffers: WeakKeyDictionary[DeviceMemory, memoryview] = WeakKeyDictionary()

    def fill(self, device: DeviceMemory, pieces: Pieces) -> tuple[memoryview, Pieces]:
        """Copy blocks into the buffer contiguously. Valid until the next call. TransferFailed on errors."""
        packed = pieces.contiguous()
        try:
            memory = self._buffer(device, pieces.num_blocks * pieces.bytes_per_block)
            device.move(memory, packed, device, pieces, None)
        except ValueError as error:
            raise TransferFailed(
                f"cannot copy device blocks: {error}", path="cuda-copy", reason="device"
            ) from None
        return memory, packed

    def _buffer(self, device: DeviceMemory, num_bytes: int) -> memoryview:
        memory = self._buffers.get(device)
        if memory is None or len(memory) < num_bytes:
            memory = self._buffers[device] = device.staging(num_bytes)
        return memory
