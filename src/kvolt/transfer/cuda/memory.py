"""CudaMemory: a tensor of a device, or a peer's by CUDA IPC, as memory that blocks are moved from and to.

Imported only where a device is used. Work goes to a stream of its own, so that it waits for nothing that is computed
and nothing waits for it; what lies in blocks that are offered must have been written before. Pinned memory of the host
is reached by the device's copy engines, in small pieces by the device itself; what is not pinned goes by way of that.
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
from kvolt.transfer.memory.device_memory import DeviceHandle, Memory, Sums
from kvolt.transfer.memory.numa import node_of_pci
from kvolt.transfer.memory.piece_checks import WORD_BYTES, check_as_many, check_pieces
from kvolt.transfer.memory.slabs import Pieces

log = logging.getLogger(__name__)

_BOUNCE_BYTES = 8 << 20
"""Of pinned memory, for what is not pinned."""
_ENGINE_BYTES = 64 << 10
"""Pieces from this size on go by the copy engines, which take about as long for each smaller one, if the driver takes
many at once."""
_WARM_UP_BYTES = (16, 8)
"""Pieces of these sizes take all forms of the kernel."""

_ours: WeakValueDictionary[DeviceHandle, CudaMemory] = WeakValueDictionary()
"""Of this process, which the driver does not let open its own handles."""


def _nothing() -> None: ...


class CudaMemory:
    """See the module: a DeviceMemory."""

    def __init__(
        self, tensor: Tensor, handle: DeviceHandle | None = None, unmap: Callable[[], None] = _nothing
    ) -> None:
        """`handle`: of the tensor's memory, for peers; without one nobody else opens it. `unmap` is called once, when
        it is closed."""
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
        """With a handle. Unsupported where the tensor's allocation has none (torch's expandable segments, say)."""
        memory = cls(tensor, handle_of(tensor))
        assert memory.handle is not None
        _ours[memory.handle] = memory
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
        found: Any = torch.cuda.get_device_properties(self._device)
        try:
            place = (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
        except AttributeError:  # an old torch
            return None
        return node_of_pci("{:04x}:{:02x}:{:02x}.0".format(*place))

    def open(self, handle: DeviceHandle) -> CudaMemory:
        with _failures():
            return _ours.get(handle) or open_memory(handle, self._device)

    def close(self) -> None:
        unmap, self._unmap = self._unmap, _nothing
        if unmap is not _nothing:
            self.tensor = self.tensor[:0]
            unmap()

    def warm_up(self) -> None:
        """Kernels are compiled now, and not while somebody waits for blocks."""
        with _failures():
            source, target = (torch.zeros(64, dtype=torch.uint8, device=self._device) for _ in range(2))
            for size in _WARM_UP_BYTES:
                places = np.arange(64 // size, dtype=np.int64) * size
                with self._on_stream():
                    self._blocks.copy(target, places, source, places, size).checksums()
                    self._blocks.checksums(source, places, size).checksums()

    def staging(self, num_bytes: int) -> memoryview:
        with _failures():
            return _view(self._pinned(num_bytes))

    def pin(self, memory: memoryview) -> Callable[[], None]:
        if self._device.type != "cuda":
            return _nothing
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            error = runtime.cudaHostRegister(address, memory.nbytes, 0)
        if int(error):
            log.warning(
                "memory of the host cannot be pinned (CUDA error %d): copies take a way round", int(error)
            )
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
        with _failures():
            to, source = self._reached(dst), self._reached(src)
            if to is None or source is None:
                return self._bounced(dst, into, src, origin, seeds)
            if to.device != source.device and _is_for_engines(into, origin):
                return self._by_engines(to, into, source, origin, seeds)
            shape = (into.piece_bytes, into.per_block, seeds)
            with self._on_stream():
                return self._blocks.copy(to, into.offsets, source, origin.offsets, *shape).checksums()

    def _by_engines(
        self, to: Tensor, into: Pieces, source: Tensor, origin: Pieces, seeds: bytes | None
    ) -> Sums:
        """Of a move from or to memory of the host, what lies in the device's memory is summed: before it goes, or after
        it came."""
        check_as_many(into.offsets, origin.offsets)
        check_pieces("dst_offsets", into.offsets, into.piece_bytes, to.nbytes)
        check_pieces("src_offsets", origin.offsets, into.piece_bytes, source.nbytes)
        ours = into if to.device == self._device else origin
        with self._on_stream():
            try:
                copy_pieces(to, into.offsets, source, origin.offsets, into.piece_bytes)
                return self.checksums(ours, seeds)  # on the same stream: all has been copied then
            finally:
                torch.cuda.current_stream(self._device).synchronize()

    def checksums(self, pieces: Pieces, seeds: bytes | None) -> Sums:
        with _failures(), self._on_stream():
            moved = self._blocks.checksums(
                self.tensor, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds
            )
            return moved.checksums()

    def _on_stream(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _reached(self, memory: Memory) -> Tensor | None:
        """As the device reaches it; None where it does not."""
        if isinstance(memory, CudaMemory):
            if memory.tensor.device != self._device:
                raise Unsupported(
                    f"blocks do not go from {memory.tensor.device} to {self._device} within a process",
                    feature="cuda-copy",
                )
            return memory.tensor
        if not isinstance(memory, memoryview):
            raise Unsupported("a memory of another kind of device", feature="cuda-copy")
        if memory.readonly:  # no tensor is
            return None
        found = torch.frombuffer(memory, dtype=torch.uint8)
        return found if self._device.type == "cpu" or found.is_pinned() else None

    def _bounced(self, dst: Memory, into: Pieces, src: Memory, origin: Pieces, seeds: bytes | None) -> Sums:
        """Part by part through pinned memory; one of the two is ours. The device sums what it loads."""
        check_as_many(into.offsets, origin.offsets)
        check_pieces("dst_offsets", into.offsets, into.piece_bytes, _num_bytes(dst))
        check_pieces("src_offsets", origin.offsets, into.piece_bytes, _num_bytes(src))
        at_once = max(_BOUNCE_BYTES // into.bytes_per_block, 1)
        if self._bounce is None or self._bounce.nbytes < at_once * into.bytes_per_block:
            self._bounce = self._pinned(max(at_once * into.bytes_per_block, _BOUNCE_BYTES))
        row, pinned = self._bounce, _view(self._bounce)
        sums = np.empty(into.num_blocks, dtype=np.uint64)
        for first in range(0, into.num_blocks, at_once):
            count = min(at_once, into.num_blocks - first)
            here, there = into.part(first, count), origin.part(first, count)
            in_row, some = here.in_row(), None if seeds is None else seeds[8 * first : 8 * (first + count)]
            shape = (here.piece_bytes, here.per_block, some)
            with self._on_stream():
                if isinstance(dst, memoryview):
                    moved = self._blocks.gather(row, self.tensor, there.offsets, *shape).checksums()
                    block_bytes.copy(dst, here.offsets, pinned, in_row.offsets, here.piece_bytes)
                else:
                    assert isinstance(src, memoryview)
                    block_bytes.copy(pinned, in_row.offsets, src, there.offsets, here.piece_bytes)
                    moved = self._blocks.scatter(self.tensor, here.offsets, row, *shape).checksums()
            sums[first : first + count] = moved
        return sums


def handle_of(tensor: Tensor) -> DeviceHandle:
    """Unsupported where others cannot open its memory."""
    with torch.cuda.device(tensor.device):
        allocation, offset = cuda_ipc.handle_of(tensor.data_ptr())
    return DeviceHandle(allocation, offset, tensor.nbytes)


def open_memory(handle: DeviceHandle, device: torch.device) -> CudaMemory:
    """Memory that another process owns, until it is closed. Unsupported where it cannot be reached from the device."""
    with torch.cuda.device(device):
        _make_current(device)
        base, size = cuda_ipc.open_handle(handle.allocation)
        try:
            if handle.offset < 0 or not 0 < handle.num_bytes <= size - handle.offset:
                raise Unsupported("a memory that lies outside of its allocation", feature="cuda-ipc")
            address = base + handle.offset
            tensor = torch.as_tensor(_Mapped(address, handle.num_bytes), device=device)
            if (
                tensor.data_ptr() != address
            ):  # another device's: torch has made a copy, which would stay as it is
                raise Unsupported("torch does not reach another device's memory", feature="cuda-ipc")
            return CudaMemory(tensor, handle, lambda: _unmap(base, device))
        except BaseException:
            cuda_ipc.close_handle(base)
            raise


def _unmap(base: int, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):
            _make_current(device)
            cuda_ipc.close_handle(base)
    except (KvoltError, RuntimeError) as error:  # the device is lost, or the process about to end
        log.debug("a peer's memory stays mapped: %s", error)


def _make_current(device: torch.device) -> None:
    """The driver's own calls need a context in the thread they are made in, which torch's bring."""
    torch.cuda.current_stream(device).synchronize()


class _Mapped:
    """What torch needs to know of memory that it has not allocated."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What torch, Triton and the driver raise, as an error of the transfer that met it."""
    try:
        yield
    except (KvoltError, ValueError):
        raise
    except Exception as error:
        told = str(error).partition("\n")[0][:300]
        raise TransferFailed(f"the device failed: {told}", path="cuda-copy", reason="device") from error


def _is_for_engines(into: Pieces, origin: Pieces) -> bool:
    """Whether pieces are large enough to be copied one by one, and can be summed where they lie."""
    if into.piece_bytes < _ENGINE_BYTES or not has_batches():
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
