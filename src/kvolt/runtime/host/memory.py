"""A process and its memory: how much it may have, and that freed blocks go back and old objects are left alone.

glibc takes a large block that was freed as a sign that more of that size will come: from then on it keeps
such blocks, up to 32 MiB each, and per thread. For a process that meets an unusual request now and then,
the largest it has ever met would be its size for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

from kvolt.runtime.host.cgroups import MEMBERSHIP, ROOT, own_groups

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_LARGE_BYTES = 256 * 1024
"""Blocks from this size on are the system's as soon as they are freed."""
_SPARE_BYTES = 4 * 1024 * 1024
"""What may stay free at the end of the heap."""
_MAX_ARENAS = 2
"""Heaps for threads: one for the loop's, one that the others share."""


def return_freed_memory() -> bool:
    """For the whole process, best before it has threads. False where the C library has no such setting."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {_M_MMAP_THRESHOLD: _LARGE_BYTES, _M_TRIM_THRESHOLD: _SPARE_BYTES, _M_ARENA_MAX: _MAX_ARENAS}
    taken = [mallopt(option, value) for option, value in wanted.items()]
    return all(taken)


def settle_garbage_collector() -> None:
    """Once all is loaded: what is there now stays, so no collection needs to look at it again.

    Requests and answers free themselves; the collector is for what forms a circle by accident, and need
    not come every seven hundred objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = ROOT, membership: Path = MEMBERSHIP
) -> int:
    """What can be taken without swapping or being killed: the machine's, or less where a container's limit is."""
    left = [_available(meminfo)]
    for folder in own_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text()) - _reclaimable(folder)
            left.append(max(0, limit - used))
    return min(left)


def _available(meminfo: Path) -> int:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel drops when memory is short; they count as used until then."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
