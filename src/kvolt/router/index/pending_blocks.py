"""Blocks that workers will hold soon: those of prompts that were sent there and are not computed yet. Pure.

A prompt that comes while another with the same beginning is computed would not find it in the index, and go elsewhere
to be computed once more.

This is put in with every booking, so it must cost next to nothing for a prompt of thousands of blocks. Hashes are
chained: a block that two prompts share says that they share all before it. So beyond the first few only every
sixteenth block is kept, and what is found may be up to fifteen blocks less than what there will be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvolt.router.index.prefix_index import BlockIndex

_MAX_BYTES = 64 << 20
_DENSE = 16
"""The first so many blocks of a prompt are kept one by one ..."""
_STRIDE = 16
"""... and of those after them every so many."""


class ExpectedBlocks:
    """By rows and tickets of a LoadBook."""

    def __init__(self) -> None:
        self._index = BlockIndex(_MAX_BYTES)
        self._slots: dict[int, int] = {}
        self._sent: dict[int, dict[int, tuple[int, ...]]] = {}
        """Of each row, what is kept of every prompt, by ticket."""

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self._sent.values()))

    @property
    def num_kept(self) -> int:
        """Blocks that are kept of them, each once for each worker."""
        return self._index.num_pairs

    def add_row(self, row: int) -> None:
        """Of a worker that has come. One too many for the index is expected to hold nothing."""
        try:
            self._slots[row] = self._index.add_worker()
        except ValueError:
            return

    def slot_of(self, row: int) -> int | None:
        """Its place in what `find` tells."""
        return self._slots.get(row)

    def send(self, row: int, ticket: int, hashes: tuple[int, ...]) -> None:
        slot = self._slots.get(row)
        if hashes and slot is not None:
            kept = self._sent.setdefault(row, {})[ticket] = kept_hashes(hashes)
            self._index.store(slot, kept)

    def end(self, row: int, ticket: int) -> None:
        """It is computed, and in the index by now; or it will not be. Not an error for one that is not here."""
        sent = self._sent.get(row, {})
        kept = sent.pop(ticket, None)
        if kept is None:
            return
        # What another prompt shares with it stays, and that is a beginning of it: the hashes are chained.
        num_shared = max((_num_common(kept, other) for other in sent.values()), default=0)
        self._index.remove(self._slots[row], kept[num_shared:])
        if not sent:
            del self._sent[row]

    def drop_row(self, row: int) -> None:
        """The worker is gone."""
        self._sent.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._index.remove_worker(slot)

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """By slot: how many blocks of a prompt, from the first on, are about to be held. None where none are.

        Exact up to the sixteenth, and beyond that rounded down to a sixteenth one.
        """
        if not self._sent:
            return None
        found = self._index.find(kept_hashes(hashes))
        if found[found.argmax()] > _DENSE:
            found += np.maximum(found - _DENSE, 0) * (_STRIDE - 1)
        return found


def kept_hashes(hashes: tuple[int, ...]) -> tuple[int, ...]:
    """Of a prompt: the same places of every prompt, so that two can be compared."""
    return hashes if len(hashes) <= _DENSE else hashes[:_DENSE] + hashes[_DENSE + _STRIDE - 1 :: _STRIDE]


def kept_depth(index: int) -> int:
    """Blocks of a prompt up to and with the one that is kept at this index."""
    return index + 1 if index < _DENSE else _DENSE + (index - _DENSE + 1) * _STRIDE


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many hashes two prompts begin with alike: if two are equal, so are all before them."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
