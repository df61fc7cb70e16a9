"""Pages of new memory, made now and not when blocks first come, which would take them several times as long.

By libc's own call: Python's holds the interpreter meanwhile, and a GiB of small pages takes the kernel a second.
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
_MOST_THREADS = 8


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def populate(memory: mmap.mmap, node: int | None = None) -> None:
    """All of it, by several threads, of which each makes pages about as fast as another; on a NUMA node, if one is
    named. Where the system cannot, or has no more memory, that is found out when it is used."""
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    if node is not None and not prefer_node(address, len(memory), node):
        log.warning("memory of the host cannot be had on NUMA node %d: copies may take longer", node)
    _libc().madvise(address, len(memory), mmap.MADV_HUGEPAGE)  # shared memory has none on many systems

    def make(start: int) -> bool:
        num_bytes = min(_PART_BYTES, len(memory) - start)
        return bool(_libc().madvise(address + start, num_bytes, _POPULATE_WRITE) == 0)

    starts = range(0, len(memory), _PART_BYTES)
    num_threads = min(_MOST_THREADS, (os.cpu_count() or 2) // 2, len(starts))
    if num_threads < 2:
        for start in starts:
            if not make(start):
                return
        return
    with ThreadPoolExecutor(num_threads, "kv-pages") as threads:
        for is_made in threads.map(make, starts):
            if not is_made:
                threads.shutdown(cancel_futures=True)
                return
