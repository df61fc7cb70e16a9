"""Summing: the checksums of blocks that a peer reads by itself, a part at a turn, told as they are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvolt.core.errors import KvoltError, TransferFailed
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.device_memory import Memory, blocks_at_once
from kvolt.transfer.memory.slabs import Pieces, Slab
from kvolt.transfer.peer.chunks import Sums

TURN_BYTES = 4 << 20
"""Work of a turn: a millisecond or so."""
_MOST_SUMS = 1 << 17
"""Told at once, however small the blocks are."""


class Summing:
    """Work. See the module."""

    def __init__(
        self,
        slab: Slab,
        pieces: Pieces,
        seeds: bytes | None,
        is_wanted: Callable[[], bool],
        tell: Callable[[int, bytes], None],
        fail: Callable[[KvoltError], None],
    ) -> None:
        """`tell` gets the first block of a part, and its checksums."""
        self._slab = slab
        self._pieces = pieces
        self._seeds = seeds
        self._is_wanted = is_wanted
        self._tell = tell
        self._fail = fail
        self._first = 0

    def turn(self) -> bool:
        if not self._is_wanted():
            return False
        first, pieces = self._first, self._pieces
        memory = self._slab.contents
        most = min(blocks_at_once(memory, memory, pieces, TURN_BYTES), _MOST_SUMS)
        count = min(most, pieces.num_blocks - first)
        seeds = None if self._seeds is None else self._seeds[8 * first : 8 * (first + count)]
        try:
            sums = sums_of(memory, pieces.part(first, count), seeds)
        except ValueError as error:  # pieces that cannot be summed, or a slab that was closed too early
            self._fail(TransferFailed(f"blocks that cannot be summed up: {error}", reason="checksum"))
            return False
        except KvoltError as error:  # of a device
            self._fail(error)
            return False
        self._first += count
        self._tell(first, sums.tobytes())
        return self._first < pieces.num_blocks


def sums_of(memory: Memory, pieces: Pieces, seeds: bytes | None) -> Sums:
    found = np.empty(pieces.num_blocks, dtype=np.uint64)
    device_memory.checksums(memory, pieces, seeds, found)
    return found
