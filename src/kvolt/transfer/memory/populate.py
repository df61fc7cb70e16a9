"""Pre-faults the pages of new memory, so that the first transfers do not pay for it.

Calls libc directly, since `mmap.madvise` holds the GIL and a GiB of small pages takes about a second.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from kvolt.transfer.memory.numa import prefer_node

log = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE: since Linux 5.14."""
_PART_BYTES = 32 << 20
_MAX_THREADS = 8


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def populate(memory: mmap.mmap, node: int | None = None) -> None:
    """Pre-fault all pages with several threads, on NUMA node `node` if given. Best effort: failures show on first
    use."""
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    if node is not None and not prefer_node(address, len(memory), node):
        log.warning("NUMA placement failed, copies may be slower: node=%d", node)
    _libc().madvise(address, len(memory), mmap.MADV_HUGEPAGE)  # unsupported for shared memory on many systems

    def fault_in(start: int) -> bool:
        num_bytes = min(_PART_BYTES, len(memory) - start)
        return bool(_libc().madvise(address + start, num_bytes, _POPULATE_WRITE) == 0)

    starts = range(0, len(memory), _PART_BYTES)
    num_threads = min(_MAX_THREADS, (os.cpu_count() or 2) // 2, len(starts))
    if num_threads < 2:
        for start in starts:
            if not fault_in(start):
                return
        return
    with ThreadPoolExecutor(num_threads, "kv-pages") as threads:
        for is_ok in threads.map(fault_in, starts):
            if not is_ok:
                threads.shutdown(cancel_futures=True)
                return
