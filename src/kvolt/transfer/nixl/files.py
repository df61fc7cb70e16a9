"""NixlFiles: pieces of files straight into memory that blocks lie in, by NIXL's storage backends.

Into a device's memory by GPUDirect Storage (`GDS_MT`), which has the disk write there itself where the system can, and
else takes a way through the host that NIXL's library chooses; into the host's by `POSIX`. Bytes are not looked at.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import TransferFailed, Unsupported
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.nixl import library as nixl_library

log = logging.getLogger(__name__)

_POLL_S = 50e-6
_STUCK_S = 5.0
_PAGE_BYTES = 4096
_HOST, _DEVICE = ("POSIX", "DRAM"), ("GDS_MT", "VRAM")
"""Which backend of NIXL, and what it calls the memory."""

Rows = npt.NDArray[np.uint64]
"""Address or offset, number of bytes, and number of the device or descriptor: one for each piece."""


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    num_bytes: int
    registered: Any


class NixlFiles:
    """See the module. For one thread. `close` gives all back."""

    def __init__(self, slabs: Sequence[Slab], *, is_direct: bool) -> None:
        """`is_direct`: files are read past the kernel's cache. Unsupported where NIXL does not work here."""
        self._slabs = tuple(slabs)
        on_device = {slab.device is not None and slab.device.ordinal is not None for slab in slabs}
        if len(on_device) != 1:
            raise Unsupported("memory of the host and of devices at once", feature="disk_direct")
        if is_direct and any(slab.block_bytes % _PAGE_BYTES for slab in slabs):
            raise Unsupported(
                f"blocks are no multiples of {_PAGE_BYTES} bytes, which files are read in past the kernel's cache",
                feature="disk_direct",
            )
        self.backend, self._kind = _DEVICE if on_device.pop() else _HOST
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        self._name = f"kvolt-files-{os.getpid()}-{id(self):x}"
        self._agent = nixl_library.new_agent(self._name, self.backend)
        self._files: dict[Path, _File] = {}
        self.is_stuck = False
        """Whether what is under way takes so long that nothing more should be asked for. It cannot be given up: bytes
        may still come."""
        self._memory: list[Any] = []
        try:
            for slab in self._slabs:
                address, ordinal = _place_of(slab)
                whole = _rows([address], slab.num_blocks * slab.block_bytes, ordinal)
                self._memory.append(self._agent.register_memory(whole, self._kind))
        except Exception as error:  # NIXL's errors have no base of their own
            self.close()
            raise Unsupported(
                f"NIXL's {self.backend} does not take this memory: {error!r}", feature="disk_direct"
            ) from None

    def close(self) -> None:
        for path in list(self._files):
            self._forget(path)
        while self._memory:
            self._deregister(self._memory.pop())

    def probe(self, folder: Path) -> None:
        """Write some bytes of the memory to a file there. Unsupported where that does not work."""
        path = folder / "nixl-probe"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | self._flags, 0o600)
            try:
                self._write_some(descriptor)
            finally:
                os.close(descriptor)
                path.unlink()
        except Exception as error:
            raise Unsupported(
                f"NIXL's {self.backend} does not reach files in {folder}: {error!r}", feature="disk_direct"
            ) from None

    def read(self, path: Path, offsets: Numbers, slab: int, blocks: Numbers, skipped: int = 0) -> None:
        """What lies at these offsets of a file into whole blocks of the slab of that number. TransferFailed where it
        does not come; no byte moves any more then. `skipped`: bytes behind each offset to begin at."""
        into = self._slabs[slab]
        address, ordinal = _place_of(into)
        try:
            descriptor = self._open(path)
            ours = _rows(address + blocks * into.block_bytes, into.block_bytes, ordinal)
            self._move("READ", ours, _rows(offsets + skipped, into.block_bytes, descriptor))
        except Exception as error:
            self._forget(path)
            raise TransferFailed(
                f"blocks did not come from {path} by NIXL: {error!r}", path="disk", reason="nixl"
            ) from None

    # ---

    def _write_some(self, descriptor: int) -> None:
        address, ordinal = _place_of(self._slabs[0])
        os.ftruncate(descriptor, _PAGE_BYTES)
        registered = self._agent.register_memory([(0, _PAGE_BYTES, descriptor, "")], "FILE")
        try:
            ours = _rows([address], _PAGE_BYTES, ordinal)
            self._move("WRITE", ours, _rows([0], _PAGE_BYTES, descriptor))
        finally:
            self._deregister(registered)

    def _move(self, operation: str, ours: Rows, theirs: Rows) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(ours, self._kind),
            agent.get_xfer_descs(theirs, "FILE"),
            self._name,
        )
        began_at = time.perf_counter()
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
                self.is_stuck = time.perf_counter() - began_at > _STUCK_S
            if state != "DONE":
                raise OSError(f"a transfer ended as {state}")
        finally:
            self.is_stuck = False
            # Takes its queue with it, which waits for what is under way: after an error others' pieces may be.
            agent.release_xfer_handle(handle)

    def _open(self, path: Path) -> int:
        known = self._files.get(path)
        if known is not None:
            now = os.fstat(known.descriptor)
            if now.st_nlink and now.st_size == known.num_bytes:
                return known.descriptor
            self._forget(path)  # its owner has given it back, and may have made it anew, or larger
        descriptor = os.open(path, os.O_RDONLY | self._flags)
        try:
            num_bytes = os.fstat(descriptor).st_size
            registered = self._agent.register_memory([(0, num_bytes, descriptor, "")], "FILE")
        except BaseException:
            os.close(descriptor)
            raise
        self._files[path] = _File(descriptor, num_bytes, registered)
        return descriptor

    def _forget(self, path: Path) -> None:
        known = self._files.pop(path, None)
        if known is not None:
            self._deregister(known.registered)
            os.close(known.descriptor)

    def _deregister(self, registered: Any) -> None:
        try:
            self._agent.deregister_memory(registered)
        except Exception as error:  # nothing more can be done about it
            log.warning("NIXL keeps what was registered with it: %r", error)


def _place_of(slab: Slab) -> tuple[int, int]:
    """Its address, and the number of the device."""
    if slab.device is not None:
        return slab.device.address, slab.device.ordinal or 0
    return int(np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data), 0


def _rows(starts: Sequence[int] | Numbers, num_bytes: int, owner: int) -> Rows:
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = starts, num_bytes, owner
    return rows
