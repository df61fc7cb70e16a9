"""Staging: memory of the host in which blocks of a file, or of a device, wait to be sent: of one part at a time."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from kvolt.core.errors import TransferFailed
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.slabs import Pieces, Slab
from kvolt.transfer.paths.file_path import read_file


class Staging:
    """See the module."""

    def __init__(self) -> None:
        self._plain = memoryview(b"")
        self._of_device: WeakKeyDictionary[DeviceMemory, memoryview] = WeakKeyDictionary()
        """By device: each has memory that is fast for it."""

    def fill(self, slab: Slab, pieces: Pieces) -> tuple[memoryview, Pieces]:
        """Blocks of a slab, side by side. Void when it is filled again. TransferFailed where there are none."""
        num_bytes = pieces.num_blocks * pieces.bytes_per_block
        in_row = pieces.in_row()
        if slab.device is None:
            if len(self._plain) < num_bytes:
                self._plain = memoryview(bytearray(num_bytes))
            read_file(slab, pieces, self._plain, in_row.offsets)
            return self._plain, in_row
        try:
            memory = self._pinned(slab.device, num_bytes)
            slab.device.move(memory, in_row, slab.device, pieces, None)
        except ValueError as error:
            raise TransferFailed(
                f"blocks of a device cannot be moved: {error}", path="cuda-copy", reason="device"
            ) from None
        return memory, in_row

    def _pinned(self, device: DeviceMemory, num_bytes: int) -> memoryview:
        memory = self._of_device.get(device)
        if memory is None or len(memory) < num_bytes:
            memory = self._of_device[device] = device.staging(num_bytes)
        return memory
