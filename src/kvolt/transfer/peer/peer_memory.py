"""PeerMemory: slabs that a peer has announced, mapped into this process, opened by a local device or known to NIXL."""

from __future__ import annotations

import mmap
import os

from kvolt.core.errors import ProtocolError
from kvolt.transfer.memory.device_memory import DeviceMemory, MemoryKind
from kvolt.transfer.memory.slabs import SlabInfo, map_for_reading
from kvolt.transfer.reads import wire

_MAX_SLABS = 1024
"""Per kind of memory."""


class PeerMemory:
    """See the module. ProtocolError for announcements that are invalid or too many, and for unknown slabs."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[SlabInfo, mmap.mmap]] = {}
        self._nixl: dict[int, wire.NixlSlab] = {}
        self._devices: dict[int, wire.DeviceSlab] = {}
        self._opened: dict[tuple[int, DeviceMemory], DeviceMemory] = {}
        """Device slabs mapped by a local device."""
        self._unopenable: set[int] = set()

    def add_shared(self, message: wire.SharedSlab, descriptor: int | None) -> None:
        """Map shared memory read-only: only the owner writes to a memory. Closes the descriptor."""
        slab = message.slab
        if descriptor is None:
            raise ProtocolError("SharedSlab without its descriptor", rule="described")
        try:
            if slab.kind is not MemoryKind.SHARED:
                raise ProtocolError(f"SharedSlab of {slab.kind} memory", rule="described")
            mapped = map_for_reading(descriptor, slab.block_bytes * slab.num_blocks)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"cannot map the peer's memory: {error}", rule="described") from None
        finally:
            os.close(descriptor)
        self._shared[slab.number] = (slab, mapped)
        _check_limit(len(self._shared))

    def add_nixl(self, message: wire.NixlSlab) -> None:
        self._nixl[message.slab.number] = message
        _check_limit(len(self._nixl))

    def add_device(self, message: wire.DeviceSlab) -> None:
        self._devices[message.slab.number] = message
        _check_limit(len(self._devices))

    def shared(self, number: int) -> tuple[SlabInfo, mmap.mmap]:
        known = self._shared.get(number)
        if known is None:
            raise _unknown_slab()
        return known

    def nixl(self, number: int) -> wire.NixlSlab:
        known = self._nixl.get(number)
        if known is None:
            raise _unknown_slab()
        return known

    def open_device(self, number: int, device: DeviceMemory | None) -> tuple[SlabInfo, DeviceMemory]:
        """Memory of a device slab as the local `device` sees it. Unsupported if it cannot open it."""
        known = self._devices.get(number)
        if known is None or device is None:
            raise _unknown_slab()
        memory = self._opened.get((number, device))
        if memory is None:
            memory = self._opened[number, device] = device.open(known.handle)
        return known.slab, memory

    def is_openable(self, number: int) -> bool:
        return number not in self._unopenable

    def mark_unopenable(self, number: int) -> None:
        """No local device can map this device slab."""
        self._unopenable.add(number)
        _check_limit(len(self._unopenable))

    def close(self) -> None:
        self._shared.clear()  # unmapped when the last reader is gone
        self._devices.clear()
        while self._opened:
            self._opened.popitem()[1].close()


def _unknown_slab() -> ProtocolError:
    return ProtocolError("Ready for an unknown slab", rule="ready")


def _check_limit(num_slabs: int) -> None:
    if num_slabs > _MAX_SLABS:
        raise ProtocolError(f"the peer announced more than {_MAX_SLABS} slabs", rule="described")
