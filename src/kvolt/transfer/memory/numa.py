"""NUMA placement of memory near a device: copies to a remote node take at least 1.5 times as long.

Linux only. No effect with a single or unknown node.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

_MBIND = {"x86_64": 237, "aarch64": 235}
"""System call number of mbind, for which libc has no function."""
_PREFERRED = 1
_MASK_BITS = 1024
_WORD_BITS = 64
_PCI = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node/online")


def node_of_pci(address: str) -> int | None:
    """NUMA node of a PCI address (`0000:19:00.0`); None with a single node or if unknown."""
    try:
        if _NODES.read_text().strip() == "0":
            return None
        node = int((_PCI / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MASK_BITS else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Prefer `node` for pages allocated from now on. Return whether the system supports it."""
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
