"""CUDA IPC handles, with which other processes of the host map an allocation: driver calls by ctypes.

torch's own sharing works between processes it spawned, with reference counts. Here the owner publishes the handle and
keeps the memory as long as it has peers. Calls need a current CUDA context.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kvolt.core.errors import Unsupported

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Flag: enable peer access to another device's memory if supported."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"no CUDA driver: {error}", feature="cuda-ipc") from None
    pointer = ctypes.c_uint64
    driver.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(pointer),
        ctypes.POINTER(ctypes.c_size_t),
        pointer,
    ]
    driver.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [pointer]
    driver.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return driver


def handle_of(address: int) -> tuple[bytes, int]:
    """IPC handle of the allocation that contains `address`, and the offset in it. Unsupported if it has none."""
    base, _ = _range_of(address)
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base), "cannot share this memory")
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> tuple[int, int]:
    """Map a peer's allocation; return its address in this process and its size. Unsupported if that fails."""
    if len(handle) != HANDLE_BYTES:
        raise Unsupported("invalid CUDA IPC handle", feature="cuda-ipc")
    base = ctypes.c_uint64()
    ipc_handle = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), ipc_handle, _LAZY_PEER_ACCESS)
    _check(status, "cannot map the peer's memory")
    try:
        return base.value, _range_of(base.value)[1]
    except Unsupported:
        close_handle(base.value)
        raise


def close_handle(base: int) -> None:
    """Unmap a peer's allocation, which must no longer be in use."""
    _check(_driver().cuIpcCloseMemHandle(base), "cannot unmap the peer's memory")


def _range_of(address: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    status = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    _check(status, "not a CUDA allocation")
    return base.value, size.value


def _check(result: int, failure: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        reason = name.value.decode() if name.value else str(result)
        raise Unsupported(f"{failure}: {reason}", feature="cuda-ipc")
