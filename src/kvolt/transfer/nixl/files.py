"""NixlFiles: reads pieces of files directly into block memory with NIXL's storage backends.

Device memory uses GPUDirect Storage (`GDS_MT`), which lets the disk write to it if the system supports that and
otherwise goes through the host; host memory uses `POSIX`. Bytes are not verified here.
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
from kvolt.transfer.paths import nixl_library

log = logging.getLogger(__name__)

_POLL_S = 50e-6
_STUCK_S = 5.0
_PAGE_BYTES = 4096
_HOST, _DEVICE = ("POSIX", "DRAM"), ("GDS_MT", "VRAM")
"""NIXL backend and its name of the memory kind."""

Rows = npt.NDArray[np.uint64]
"""Per piece: address or offset, number of bytes, device ordinal or file descriptor."""


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    num_bytes: int
    registered: Any


class NixlFiles:
    """See the module. One thread only. `close` releases all registrations."""

    def __init__(self, slabs: Sequence[Slab], *, is_direct: bool) -> None:
        """`is_direct`: bypass the page cache. Unsupported if NIXL fails with this memory."""
        self._slabs = tuple(slabs)
        on_device = {slab.device is not None and slab.device.ordinal is not None for slab in slabs}
        if len(on_device) != 1:
            raise Unsupported("slabs are in both host and device memory", feature="disk_direct")
        if is_direct and any(slab.block_bytes % _PAGE_BYTES for slab in slabs):
            raise Unsupported(
                f"block size must be a multiple of {_PAGE_BYTES} bytes to bypass the page cache",
                feature="disk_direct",
            )
        self.backend, self._kind = _DEVICE if on_device.pop() else _HOST
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
        self._name = f"kvolt-files-{os.getpid()}-{id(self):x}"
        self._agent = nixl_library.new_agent(self._name, self.backend)
        self._files: dict[Path, _File] = {}
        self.is_stuck = False
        """The current transfer exceeds its expected time, so no further one should start. It cannot be cancelled: bytes
        may still arrive."""
        self._memory: list[Any] = []
        try:
            for slab in self._slabs:
                address, ordinal = _address_of(slab)
                whole = _rows([address], slab.num_blocks * slab.block_bytes, ordinal)
                self._memory.append(self._agent.register_memory(whole, self._kind))
        except Exception as error:  # NIXL's errors have no common base class
            self.close()
            raise Unsupported(
                f"the NIXL backend {self.backend} rejects this memory: {error!r}", feature="disk_direct"
            ) from None

    def close(self) -> None:
        for path in list(self._files):
            self._close_file(path)
        while self._memory:
            self._deregister(self._memory.pop())

    def probe(self, folder: Path) -> None:
        """Write some bytes to a probe file in `folder`. Unsupported if that fails."""
        path = folder / "nixl-probe"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | self._flags, 0o600)
            try:
                self._write_probe(descriptor)
            finally:
                os.close(descriptor)
                path.unlink()
        except Exception as error:
            raise Unsupported(
                f"the NIXL backend {self.backend} cannot access files in {folder}: {error!r}",
                feature="disk_direct",
            ) from None

    def read(self, path: Path, offsets: Numbers, slab: int, blocks: Numbers, skipped: int = 0) -> None:
        """Read whole blocks of the slab with index `slab` from these file offsets plus `skipped` bytes. TransferFailed
        on errors; no byte moves afterwards."""
        into = self._slabs[slab]
        address, ordinal = _address_of(into)
        try:
            descriptor = self._open(path)
            local = _rows(address + blocks * into.block_bytes, into.block_bytes, ordinal)
            self._move("READ", local, _rows(offsets + skipped, into.block_bytes, descriptor))
        except Exception as error:
            self._close_file(path)
            raise TransferFailed(
                f"cannot read blocks from {path} with NIXL: {error!r}", path="disk", reason="nixl"
            ) from None

    def _write_probe(self, descriptor: int) -> None:
        address, ordinal = _address_of(self._slabs[0])
        os.ftruncate(descriptor, _PAGE_BYTES)
        registered = self._agent.register_memory([(0, _PAGE_BYTES, descriptor, "")], "FILE")
        try:
            local = _rows([address], _PAGE_BYTES, ordinal)
            self._move("WRITE", local, _rows([0], _PAGE_BYTES, descriptor))
        finally:
            self._deregister(registered)

    def _move(self, operation: str, local: Rows, file_rows: Rows) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(local, self._kind),
            agent.get_xfer_descs(file_rows, "FILE"),
            self._name,
        )
        started_at = time.perf_counter()
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
                self.is_stuck = time.perf_counter() - started_at > _STUCK_S
            if state != "DONE":
                raise OSError(f"transfer ended with state {state}")
        finally:
            self.is_stuck = False
            # Releasing waits for its queue: after an error, other pieces may still be in flight.
            agent.release_xfer_handle(handle)

    def _open(self, path: Path) -> int:
        known = self._files.get(path)
        if known is not None:
            now = os.fstat(known.descriptor)
            if now.st_nlink and now.st_size == known.num_bytes:
                return known.descriptor
            self._close_file(path)  # deleted or resized by its owner
        descriptor = os.open(path, os.O_RDONLY | self._flags)
        try:
            num_bytes = os.fstat(descriptor).st_size
            registered = self._agent.register_memory([(0, num_bytes, descriptor, "")], "FILE")
        except BaseException:
            os.close(descriptor)
            raise
        self._files[path] = _File(descriptor, num_bytes, registered)
        return descriptor

    def _close_file(self, path: Path) -> None:
        known = self._files.pop(path, None)
        if known is not None:
            self._deregister(known.registered)
            os.close(known.descriptor)

    def _deregister(self, registered: Any) -> None:
        try:
            self._agent.deregister_memory(registered)
        except Exception as error:  # no recovery possible
            log.warning("NIXL deregistration failed: error=%r", error)


def _address_of(slab: Slab) -> tuple[int, int]:
    """Address and device ordinal of a slab."""
    if slab.device is not None:
        return slab.device.address, slab.device.ordinal or 0
    return int(np.frombuffer(slab.memory, dtype=np.uint8).ctypes.data), 0


def _rows(starts: Sequence[int] | Numbers, num_bytes: int, owner: int) -> Rows:
    rows = np.empty((len(starts), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = starts, num_bytes, owner
    return rows
