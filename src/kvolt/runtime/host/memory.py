"""Memory of this process: available memory, returning freed memory to the system, garbage collector settings.

By default glibc raises its mmap threshold when a large block is freed, and then keeps such blocks (up to 32 MiB each,
per thread). A process would keep the size of its largest request ever.
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
"""Blocks of at least this size are returned to the system as soon as they are freed."""
_SPARE_BYTES = 4 * 1024 * 1024
"""Limit of free memory at the end of the heap."""
_MAX_ARENAS = 2
"""Number of heaps: one for the event loop's thread, one shared by all other threads."""


def return_freed_memory() -> bool:
    """Set the malloc options of the process, best before it starts threads. False if the C library has none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {_M_MMAP_THRESHOLD: _LARGE_BYTES, _M_TRIM_THRESHOLD: _SPARE_BYTES, _M_ARENA_MAX: _MAX_ARENAS}
    accepted = [mallopt(option, value) for option, value in options.items()]
    return all(accepted)


def settle_garbage_collector() -> None:
    """Exclude existing objects from garbage collection and collect less often. Call it after start-up.

    Requests and responses are freed by reference counting; the collector only handles accidental cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def free_bytes(
    meminfo: Path = Path("/proc/meminfo"), root: Path = ROOT, membership: Path = MEMBERSHIP
) -> int:
    """Memory that can be allocated without swapping or being killed: of the machine, or within the container's
    limit."""
    available = [_available(meminfo)]
    for folder in own_groups(root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text()) - _reclaimable(folder)
            available.append(max(0, limit - used))
    return min(available)


def _available(meminfo: Path) -> int:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _reclaimable(folder: Path) -> int:
    """File pages of a cgroup that the kernel drops under memory pressure; they count as used."""
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
