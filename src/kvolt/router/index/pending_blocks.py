"""Pending blocks: blocks of prompts that were sent to a worker and are not computed yet. Pure.

Without them a prompt that arrives while another with the same prefix is computed would find no match in the index and
be computed again elsewhere.

Every reservation adds its prompt, so adding must be cheap for thousands of blocks. Hashes are chained: two prompts that
share a block share all before it. Therefore beyond the first few blocks only every sixteenth is stored, and a match
may be up to fifteen blocks short.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvolt.router.index.prefix_index import BlockIndex

_MAX_BYTES = 64 << 20
_DENSE = 16
"""Leading blocks of a prompt that are all stored."""
_STRIDE = 16
"""Distance of the blocks stored after those."""


class PendingBlocks:
    """Pending blocks by row of WorkerLoads and reservation."""

    def __init__(self) -> None:
        self._index = BlockIndex(_MAX_BYTES)
        self._slots: dict[int, int] = {}
        self._prompts: dict[int, dict[int, tuple[int, ...]]] = {}
        """By row and reservation id: the stored hashes of each prompt."""

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self._prompts.values()))

    @property
    def num_kept(self) -> int:
        """Stored blocks, counted once per worker."""
        return self._index.num_pairs

    def add_row(self, row: int) -> None:
        """Add a worker. Without a free index slot it has no pending blocks."""
        try:
            self._slots[row] = self._index.add_worker()
        except ValueError:
            return

    def slot_of(self, row: int) -> int | None:
        """Slot of a row in the result of `find`."""
        return self._slots.get(row)

    def add_prompt(self, row: int, reservation_id: int, hashes: tuple[int, ...]) -> None:
        slot = self._slots.get(row)
        if hashes and slot is not None:
            sampled = self._prompts.setdefault(row, {})[reservation_id] = kept_hashes(hashes)
            self._index.store(slot, sampled)

    def remove_prompt(self, row: int, reservation_id: int) -> None:
        """Remove a prompt that is computed or cancelled. Unknown prompts are ignored."""
        prompts = self._prompts.get(row, {})
        sampled = prompts.pop(reservation_id, None)
        if sampled is None:
            return
        # Keep the longest prefix that it shares with another prompt: hashes are chained.
        num_shared = max((_num_common(sampled, other) for other in prompts.values()), default=0)
        self._index.remove(self._slots[row], sampled[num_shared:])
        if not prompts:
            del self._prompts[row]

    def drop_row(self, row: int) -> None:
        """Remove a worker."""
        self._prompts.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._index.remove_worker(slot)

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """Number of leading blocks of a prompt that are pending, by slot; None if no prompt is pending.

        Exact up to sixteen blocks, beyond that rounded down to a multiple of sixteen.
        """
        if not self._prompts:
            return None
        depths = self._index.find(kept_hashes(hashes))
        if depths[depths.argmax()] > _DENSE:
            depths += np.maximum(depths - _DENSE, 0) * (_STRIDE - 1)
        return depths


def kept_hashes(hashes: tuple[int, ...]) -> tuple[int, ...]:
    """Sampled hashes of a prompt, at the same positions for every prompt."""
    return hashes if len(hashes) <= _DENSE else hashes[:_DENSE] + hashes[_DENSE + _STRIDE - 1 :: _STRIDE]


def kept_depth(index: int) -> int:
    """Depth in blocks of the sampled hash at this index."""
    return index + 1 if index < _DENSE else _DENSE + (index - _DENSE + 1) * _STRIDE


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common prefix, by binary search: equal hashes imply equal prefixes."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
