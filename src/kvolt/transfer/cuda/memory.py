"""CudaMemory: a DeviceMemory over a CUDA tensor, or over a peer's memory mapped by CUDA IPC.

Imported only if a device is used. Work runs on its own stream, independent of computation, so offered blocks must have
been written completely. Copies to and from pinned host memory use the copy engines, small pieces a kernel; pageable
memory goes through a pinned bounce buffer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from kvolt.core.errors import KvoltError, TransferFailed, Unsupported
from kvolt.transfer.cuda import ipc as cuda_ipc
from kvolt.transfer.cuda.copies import copy_pieces, has_batches
from kvolt.transfer.cuda.triton_blocks import DeviceBlocks
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.device_memory import DeviceHandle, Memory
from kvolt.transfer.memory.numa import node_of_pci
from kvolt.transfer.memory.pieces import WORD_BYTES, Pieces, Sums, check_as_many, check_pieces

log = logging.getLogger(__name__)

_BOUNCE_BYTES = 8 << 20
"""Size of the bounce buffer for pageable memory."""
_COPY_ENGINE_BYTES = 64 << 10
"""Minimum piece size for the copy engines, which take about as long for smaller pieces. Needs batched copies."""
_WARM_UP_BYTES = (16, 8)
"""Piece sizes that compile all variants of the kernel."""

_local_memory: WeakValueDictionary[DeviceHandle, CudaMemory] = WeakValueDictionary()
"""Memory of this process by handle: the driver cannot open a handle in the process that owns it."""


def _nothing() -> None: ...


class CudaMemory:
    """See the module."""

    def __init__(
        self, tensor: Tensor, handle: DeviceHandle | None = None, unmap: Callable[[], None] = _nothing
    ) -> None:
        """`handle`: IPC handle for peers; None: not shareable. `unmap` is called once, on close."""
        self.tensor = tensor.view(-1).view(torch.uint8)
        self.handle = handle
        self.name = _name_of(tensor.device)
        self._unmap = unmap
        self._device = tensor.device
        self._blocks = DeviceBlocks(tensor.device)
        self._stream = _new_stream(tensor.device)
        self._bounce: Tensor | None = None

    @classmethod
    def shared(cls, tensor: Tensor) -> CudaMemory:
        """Memory with an IPC handle. Unsupported if the allocation has none, such as torch's expandable segments."""
        memory = cls(tensor, handle_of(tensor))
        assert memory.handle is not None
        _local_memory[memory.handle] = memory
        return memory

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def ordinal(self) -> int | None:
        return self._device.index if self._device.type == "cuda" else None

    @property
    def numa_node(self) -> int | None:
        if self._device.type != "cuda":
            return None
        properties: Any = torch.cuda.get_device_properties(self._device)
        try:
            place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        except AttributeError:  # old torch
            return None
        return node_of_pci("{:04x}:{:02x}:{:02x}.0".format(*place))

    def open(self, handle: DeviceHandle) -> CudaMemory:
        with _as_transfer_errors():
            return _local_memory.get(handle) or open_memory(handle, self._device)

    def close(self) -> None:
        unmap, self._unmap = self._unmap, _nothing
        if unmap is not _nothing:
            self.tensor = self.tensor[:0]
            unmap()

    def warm_up(self) -> None:
        """Compile the kernels now instead of during the first transfer."""
        with _as_transfer_errors():
            source, target = (torch.zeros(64, dtype=torch.uint8, device=self._device) for _ in range(2))
            for size in _WARM_UP_BYTES:
                places = np.arange(64 // size, dtype=np.int64) * size
                with self._on_stream():
                    self._blocks.copy(target, places, source, places, size).checksums()
                    self._blocks.checksums(source, places, size).checksums()

    def staging(self, num_bytes: int) -> memoryview:
        with _as_transfer_errors():
            return _view(self._pinned(num_bytes))

    def pin(self, memory: memoryview) -> Callable[[], None]:
        if self._device.type != "cuda":
            return _nothing
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            error = runtime.cudaHostRegister(address, memory.nbytes, 0)
        if int(error):
            log.warning("pinning host memory failed, copies use a bounce buffer: cuda_error=%d", int(error))
            return _nothing

        def unpin() -> None:
            with torch.cuda.device(self._device):
                runtime.cudaHostUnregister(address)

        return unpin

    def for_thread(self) -> CudaMemory:
        return CudaMemory(self.tensor)

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def move(self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None) -> Sums:
        with _as_transfer_errors():
            to, source = self._as_tensor(dst), self._as_tensor(src)
            if to is None or source is None:
                return self._move_bounced(dst, into, src, origin, seeds)
            if to.device != source.device and _fits_copy_engines(into, origin):
                return self._move_by_copy_engines(to, into, source, origin, seeds)
            layout = (into.piece_bytes, into.per_block, seeds)
            with self._on_stream():
                return self._blocks.copy(to, into.offsets, source, origin.offsets, *layout).checksums()

    def _move_by_copy_engines(
        self, to: Tensor, into: Pieces, source: Tensor, origin: Pieces, seeds: bytes | None
    ) -> Sums:
        """Copy between device and host memory. The checksums are computed from the device side."""
        check_as_many(into.offsets, origin.offsets)
        check_pieces("dst_offsets", into.offsets, into.piece_bytes, to.nbytes)
        check_pieces("src_offsets", origin.offsets, into.piece_bytes, source.nbytes)
        on_device = into if to.device == self._device else origin
        with self._on_stream():
            try:
                copy_pieces(to, into.offsets, source, origin.offsets, into.piece_bytes)
                return self.checksums(on_device, seeds)  # same stream, so after the copies
            finally:
                torch.cuda.current_stream(self._device).synchronize()

    def checksums(self, pieces: Pieces, seeds: bytes | None) -> Sums:
        with _as_transfer_errors(), self._on_stream():
            moved = self._blocks.checksums(
                self.tensor, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds
            )
            return moved.checksums()

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _as_tensor(self, memory: Memory) -> Tensor | None:
        """Tensor over memory that the device can access directly; None if it cannot."""
        if isinstance(memory, CudaMemory):
            if memory.tensor.device != self._device:
                raise Unsupported(
                    f"cannot copy blocks from {memory.tensor.device} to {self._device} within a process",
                    feature="cuda-copy",
                )
            return memory.tensor
        if not isinstance(memory, memoryview):
            raise Unsupported("unsupported kind of device memory", feature="cuda-copy")
        if memory.readonly:  # torch has no read-only tensors
            return None
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        return tensor if self._device.type == "cpu" or tensor.is_pinned() else None

    def _move_bounced(
        self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None
    ) -> Sums:
        """Copy in parts through the bounce buffer; one side is this memory. The device computes the checksums."""
        check_as_many(into.offsets, origin.offsets)
        check_pieces("dst_offsets", into.offsets, into.piece_bytes, _num_bytes(dst))
        check_pieces("src_offsets", origin.offsets, into.piece_bytes, _num_bytes(src))
        batch = max(_BOUNCE_BYTES // into.bytes_per_block, 1)
        if self._bounce is None or self._bounce.nbytes < batch * into.bytes_per_block:
            self._bounce = self._pinned(max(batch * into.bytes_per_block, _BOUNCE_BYTES))
        bounce, pinned = self._bounce, _view(self._bounce)
        sums = np.empty(into.num_blocks, dtype=np.uint64)
        for first in range(0, into.num_blocks, batch):
            count = min(batch, into.num_blocks - first)
            destination_part, origin_part = into.slice(first, count), origin.slice(first, count)
            packed, part_seeds = (
                destination_part.contiguous(),
                None if seeds is None else seeds[8 * first : 8 * (first + count)],
            )
            layout = (destination_part.piece_bytes, destination_part.per_block, part_seeds)
            with self._on_stream():
                size = destination_part.piece_bytes
                if isinstance(dst, memoryview):
                    moved = self._blocks.copy(
                        bounce, packed.offsets, self.tensor, origin_part.offsets, *layout
                    ).checksums()
                    block_bytes.copy(dst, destination_part.offsets, pinned, packed.offsets, size)
                else:
                    assert isinstance(src, memoryview)
                    block_bytes.copy(pinned, packed.offsets, src, origin_part.offsets, size)
                    moved = self._blocks.copy(
                        self.tensor, destination_part.offsets, bounce, packed.offsets, *layout
                    ).checksums()
            sums[first : first + count] = moved
        return sums


def handle_of(tensor: Tensor) -> DeviceHandle:
    """IPC handle of a tensor. Unsupported if other processes cannot open its memory."""
    with torch.cuda.device(tensor.device):
        allocation, offset = cuda_ipc.handle_of(tensor.data_ptr())
    return DeviceHandle(allocation, offset, tensor.nbytes)


def open_memory(handle: DeviceHandle, device: torch.device) -> CudaMemory:
    """Map another process's memory until closed. Unsupported if the device cannot access it."""
    with torch.cuda.device(device):
        _make_current(device)
        base, size = cuda_ipc.open_handle(handle.allocation)
        try:
            if handle.offset < 0 or not 0 < handle.num_bytes <= size - handle.offset:
                raise Unsupported("the memory is outside its allocation", feature="cuda-ipc")
            address = base + handle.offset
            tensor = torch.as_tensor(_CudaArray(address, handle.num_bytes), device=device)
            if tensor.data_ptr() != address:  # memory of another device: torch made a copy
                raise Unsupported("torch cannot access the memory of another device", feature="cuda-ipc")
            return CudaMemory(tensor, handle, lambda: _unmap(base, device))
        except BaseException:
            cuda_ipc.close_handle(base)
            raise


def _unmap(base: int, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            _make_current(device)
            cuda_ipc.close_handle(base)
    except (KvoltError, RuntimeError) as error:  # device lost or process exiting
        log.debug("unmapping peer memory failed: error=%s", error)


def _make_current(device: torch.device) -> None:
    """Make the CUDA context current in this thread, by a torch call."""
    torch.cuda.current_stream(device).synchronize()


class _CudaArray:
    """Array interface for memory that torch did not allocate."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@contextlib.contextmanager
def _as_transfer_errors() -> Iterator[None]:
    """Convert exceptions of torch, Triton and the driver to TransferFailed."""
    try:
        yield
    except (KvoltError, ValueError):
        raise
    except Exception as error:
        detail = str(error).partition("\n")[0][:300]
        raise TransferFailed(f"the device failed: {detail}", path="cuda-copy", reason="device") from error


def _fits_copy_engines(into: Pieces, origin: Pieces) -> bool:
    """Whether pieces are large enough for the copy engines and aligned for checksums in place."""
    if into.piece_bytes < _COPY_ENGINE_BYTES or not has_batches():
        return False
    return not any(
        int(np.bitwise_or.reduce(each.offsets, initial=each.piece_bytes)) % WORD_BYTES
        for each in (into, origin)
    )


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _view(pinned: Tensor) -> memoryview:
    # Before Python 3.12 numpy's types do not say that an array is a buffer.
    return memoryview(cast("bytes", pinned.numpy()))


def _num_bytes(memory: Memory) -> int:
    return memory.nbytes if isinstance(memory, memoryview) else memory.num_bytes


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)
