"""ChecksumTask: computes checksums of blocks that a peer reads by itself, in steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvolt.core.errors import KvoltError, TransferFailed
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.device_memory import Memory, blocks_per_step
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.memory.slabs import Slab

STEP_BYTES = 4 << 20
"""Bytes per step, about a millisecond."""
_MAX_CHECKSUMS = 1 << 17
"""Checksums per message."""


class ChecksumTask:
    """Work. See the module."""

    def __init__(
        self,
        slab: Slab,
        pieces: Pieces,
        seeds: bytes | None,
        is_wanted: Callable[[], bool],
        on_checksums: Callable[[int, bytes], None],
        on_error: Callable[[KvoltError], None],
    ) -> None:
        """`on_checksums` gets the index of the first block and the checksums of each step."""
        self._slab = slab
        self._pieces = pieces
        self._seeds = seeds
        self._is_wanted = is_wanted
        self._on_checksums = on_checksums
        self._on_error = on_error
        self._first = 0

    def step(self) -> bool:
        if not self._is_wanted():
            return False
        first, pieces = self._first, self._pieces
        memory = self._slab.contents
        max_blocks = min(blocks_per_step(memory, memory, pieces, STEP_BYTES), _MAX_CHECKSUMS)
        count = min(max_blocks, pieces.num_blocks - first)
        seeds = None if self._seeds is None else self._seeds[8 * first : 8 * (first + count)]
        try:
            sums = compute_checksums(memory, pieces.slice(first, count), seeds)
        except ValueError as error:  # invalid pieces or a closed slab
            self._on_error(TransferFailed(f"cannot compute checksums: {error}", reason="checksum"))
            return False
        except KvoltError as error:  # of a device
            self._on_error(error)
            return False
        self._first += count
        self._on_checksums(first, sums.tobytes())
        return self._first < pieces.num_blocks


def compute_checksums(memory: Memory, pieces: Pieces, seeds: bytes | None) -> Sums:
    checksums = np.empty(pieces.num_blocks, dtype=np.uint64)
    device_memory.checksums(memory, pieces, seeds, checksums)
    return checksums
