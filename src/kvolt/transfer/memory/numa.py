"""Memory on the NUMA node of a device: a copy to the far one crosses the link between sockets, and takes half as long
again or more. Linux only; where there is one node, or nothing is known, nothing is done."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, which libc has no function for."""
_PREFERRED = 1
_MASK_BITS = 1024
_WORD_BITS = 64
_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node/online")


def node_of_pci(address: str) -> int | None:
    """Of a device by its address (`0000:19:00.0`); None where there is one node only, or it is not known."""
    try:
        if _NODES.read_text().strip() == "0":
            return None
        node = int((_PCI / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Pages of this memory that are made from now on are of that node, while it has any; whether the system does so."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = (ctypes.c_uint64 * (_MASK_BITS // _WORD_BITS))()
    words[node // _WORD_BITS] = 1 << (node % _WORD_BITS)
    return _call(number, address, num_bytes, _PREFERRED, words, _MASK_BITS) == 0


def _call(number: int, address: int, num_bytes: int, mode: int, mask: Any, num_bits: int) -> int:
    pointer, size = ctypes.c_void_p, ctypes.c_ulong
    arguments = (ctypes.c_long(number), pointer(address), size(num_bytes), ctypes.c_int(mode))
    return int(_syscall()(*arguments, mask, size(num_bits), ctypes.c_uint(0)))


@cache
def _syscall() -> Any:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return syscall
