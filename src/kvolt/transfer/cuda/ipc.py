"""CUDA's handles of allocations, by which other processes of a host map them: the driver's own calls, by ctypes.

torch shares tensors in its own way, between processes that it made and with counts of who has them; here the owner of a
memory only tells its handle, and keeps the memory as long as there are peers. Calls need a CUDA context to be current.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kvolt.core.errors import Unsupported

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""Flag: another device's memory is reached, too, where the two can."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"there is no CUDA driver: {error}", feature="cuda-ipc") from None
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
    """Of the allocation that an address lies in, and how far from its start. Unsupported where it has none."""
    base, _ = _range_of(address)
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(ctypes.byref(handle), base), "its memory cannot be shared")
    return bytes(handle.reserved), address - base


def open_handle(handle: bytes) -> tuple[int, int]:
    """Where a peer's allocation lies for this process, and its size. Unsupported where it cannot be mapped."""
    if len(handle) != HANDLE_BYTES:
        raise Unsupported("no handle of a CUDA allocation", feature="cuda-ipc")
    base = ctypes.c_uint64()
    given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(base), given, _LAZY_PEER_ACCESS)
    _check(opened, "a peer's memory cannot be mapped")
    try:
        return base.value, _range_of(base.value)[1]
    except Unsupported:
        close_handle(base.value)
        raise


def close_handle(base: int) -> None:
    """Nothing may read from it any more."""
    _check(_driver().cuIpcCloseMemHandle(base), "a peer's memory cannot be unmapped")


def _range_of(address: int) -> tuple[int, int]:
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    found = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
    _check(found, "no allocation of CUDA")
    return base.value, size.value


def _check(result: int, told: str) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(name))
        said = name.value.decode() if name.value else str(result)
        raise Unsupported(f"{told}: {said}", feature="cuda-ipc")
