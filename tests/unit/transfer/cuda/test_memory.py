"""A tensor as memory that blocks are moved from and to: interpreted on the CPU, with a driver that is none."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.transfer.cuda import (
    test_triton_blocks as interpreted,  # Triton must be told before it is imported
)

from kvolt.core.errors import TransferFailed, Unsupported
from kvolt.transfer.cuda import ipc as cuda_ipc
from kvolt.transfer.cuda import memory as cuda_memory
from kvolt.transfer.cuda.memory import CudaMemory
from kvolt.transfer.memory.checksum import checksums
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.pieces import Pieces

torch = interpreted.torch
BLOCK, NUM = 64, 16
FROM = Pieces(np.array([3, 9, 4, 15], dtype=np.int64) * BLOCK, BLOCK)
TO = Pieces(np.array([0, 5, 1, 2], dtype=np.int64) * BLOCK, BLOCK)
SEEDS = np.arange(4, dtype=np.uint64)


def memory(seed: int = 0) -> CudaMemory:
    return CudaMemory(interpreted.memory(NUM * BLOCK, seed))


def rows(held: Any) -> Any:
    return np.frombuffer(held, dtype=np.uint8).reshape(NUM, BLOCK)


def expected(source: Any) -> list[int]:
    return [int(each) for each in checksums(source, FROM.offsets, BLOCK, 1, SEEDS)]


def test_from_device_to_device() -> None:
    one, other = memory(1), memory(2)
    sums = other.move(other, TO, one, FROM, SEEDS.tobytes())
    assert sums.tolist() == expected(one.tensor.numpy())
    assert (
        rows(other.tensor.numpy())[TO.offsets // BLOCK] == rows(one.tensor.numpy())[FROM.offsets // BLOCK]
    ).all()
    assert other.checksums(TO, SEEDS.tobytes()).tolist() == sums.tolist()


@pytest.mark.parametrize("bounce_bytes", [BLOCK, 3 * BLOCK, 1 << 20])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_from_and_to_the_host(bounce_bytes: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device does not reach goes through memory that it does, part by part."""
    monkeypatch.setattr(cuda_memory, "_BOUNCE_BYTES", bounce_bytes)
    if not is_pinned:
        reached = CudaMemory._as_tensor
        monkeypatch.setattr(
            CudaMemory,
            "_as_tensor",
            lambda self, other: None if isinstance(other, memoryview) else reached(self, other),
        )
    device, host = memory(1), memoryview(bytearray(NUM * BLOCK))
    sums = device.move(host, TO, device, FROM, SEEDS.tobytes())
    assert sums.tolist() == expected(device.tensor.numpy())
    assert (rows(host)[TO.offsets // BLOCK] == rows(device.tensor.numpy())[FROM.offsets // BLOCK]).all()
    back = memory(3)
    assert back.move(back, FROM, host, TO, SEEDS.tobytes()).tolist() == sums.tolist()
    assert (rows(back.tensor.numpy())[FROM.offsets // BLOCK] == rows(host)[TO.offsets // BLOCK]).all()


def test_from_memory_that_may_only_be_read() -> None:
    device, host = memory(1), memoryview(bytes(range(256)) * 4)
    device.move(device, TO, host, FROM, None)
    assert (rows(device.tensor.numpy())[TO.offsets // BLOCK] == rows(host)[FROM.offsets // BLOCK]).all()


@pytest.mark.parametrize("outside", [-BLOCK, NUM * BLOCK])
def test_what_lies_outside_is_refused_before_anything_moves(outside: int) -> None:
    device, host = memory(1), memoryview(bytes(NUM * BLOCK))
    before = device.tensor.clone()
    wrong = Pieces(np.array([0, outside], dtype=np.int64), BLOCK)
    with pytest.raises(ValueError, match="outside"):
        device.move(device, TO.slice(0, 2), host, wrong, None)
    with pytest.raises(ValueError, match="outside"):
        device.checksums(wrong, None)
    assert torch.equal(before, device.tensor)


def test_what_a_device_fails_at_is_an_error_of_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    device = memory(1)

    def fail(*arguments: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(device, "_blocks", SimpleNamespace(copy=fail, checksums=fail))
    monkeypatch.setattr(device, "_pinned", fail)
    with pytest.raises(TransferFailed, match=r"out of memory$"):
        device.move(device, TO, memory(2), FROM, None)
    with pytest.raises(TransferFailed):
        device.checksums(TO, None)
    with pytest.raises(TransferFailed):
        device.staging(8)


def test_kernels_can_be_compiled_before_they_are_needed() -> None:
    device = memory(1)
    before = device.tensor.clone()
    device.warm_up()
    assert torch.equal(before, device.tensor)


# --- handles


class Driver:
    """Knows one allocation, at 4096 with 1000 bytes."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.closed: list[int] = []
        self.refuses = 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> int:
        if not 4096 <= address < 5096:
            return 1
        base._obj.value, size._obj.value = 4096, 1000
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: int) -> int:
        ctypes.memmove(ctypes.addressof(handle._obj), b"H" * cuda_ipc.HANDLE_BYTES, cuda_ipc.HANDLE_BYTES)
        return 0

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: int) -> int:
        if self.refuses:
            return self.refuses
        self.opened.append(bytes(handle.reserved))
        base._obj.value = 4096
        return 0

    def cuIpcCloseMemHandle(self, base: int) -> int:
        self.closed.append(base)
        return 0

    def cuGetErrorName(self, result: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_MAP_FAILED"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: made)
    monkeypatch.setattr(cuda_memory, "_make_current", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: SimpleContext())
    return made


class SimpleContext:
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...


def test_a_handle_is_of_an_allocation_and_says_how_far_into_it(driver: Driver) -> None:
    assert cuda_ipc.handle_of(4100) == (b"H" * 64, 4)
    with pytest.raises(Unsupported, match="CUDA_ERROR_MAP_FAILED"):
        cuda_ipc.handle_of(1)


def test_a_handle_that_cannot_be_opened(driver: Driver) -> None:
    driver.refuses = 205
    with pytest.raises(Unsupported, match="CUDA_ERROR_MAP_FAILED"):
        cuda_ipc.open_handle(b"H" * 64)
    with pytest.raises(Unsupported, match="invalid CUDA IPC handle"):
        cuda_ipc.open_handle(b"H")
    assert not driver.opened


@pytest.mark.parametrize(("offset", "num_bytes"), [(-8, 16), (0, 1001), (999, 2), (1000, 1), (0, 0)])
def test_what_a_peer_says_lies_outside_of_its_allocation(driver: Driver, offset: int, num_bytes: int) -> None:
    with pytest.raises(Unsupported, match="outside"):
        cuda_memory.open_memory(DeviceHandle(b"H" * 64, offset, num_bytes), torch.device("cpu"))
    assert driver.closed == [4096]


def test_a_memory_is_given_back_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda mapped, device: held)
    monkeypatch.setattr(type(held), "data_ptr", lambda self: 4096 + 8, raising=False)
    opened = cuda_memory.open_memory(DeviceHandle(b"H" * 64, 8, 64), torch.device("cpu"))
    assert opened.num_bytes == 64
    opened.close()
    opened.close()
    assert driver.closed == [4096]


def test_a_copy_in_the_place_of_a_peer_s_memory_is_refused(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda mapped, device: torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(Unsupported, match="another device"):
        cuda_memory.open_memory(DeviceHandle(b"H" * 64, 8, 64), torch.device("cpu"))
    assert driver.closed == [4096]


def test_its_own_memory_a_process_does_not_open(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "handle_of", lambda tensor: DeviceHandle(b"H" * 64, 0, tensor.nbytes))
    one = CudaMemory.shared(interpreted.memory(NUM * BLOCK, 1))
    assert one.handle is not None
    assert memory(2).open(one.handle) is one
    assert not driver.opened
