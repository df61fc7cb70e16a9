"""Blocks that workers will hold soon: those of prompts that were sent there and are not computed yet. Pure.

A prompt that comes while another with the same beginning is computed would not find it in the index, and go elsewhere
to be computed once more.
"""

from __future__ import annotations

import numpy as np

from kvolt.core.latency import Floats
from kvolt.router.index import BlockIndex
from kvolt.router.load import Rows

_MAX_BYTES = 64 << 20


class ExpectedBlocks:
    """By rows and tickets of a LoadBook."""

    def __init__(self) -> None:
        self._index = BlockIndex(_MAX_BYTES)
        self._slots: dict[int, int] = {}
        self._sent: dict[int, dict[int, tuple[int, ...]]] = {}
        """Of each row, the hashes of every prompt, by ticket."""

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self._sent.values()))

    def send(self, row: int, ticket: int, hashes: tuple[int, ...]) -> None:
        if not hashes:
            return
        slot = self._slots.get(row)
        if slot is None:
            slot = self._slots[row] = self._index.add_worker()
        self._sent.setdefault(row, {})[ticket] = hashes
        self._index.store(slot, hashes)

    def end(self, row: int, ticket: int) -> None:
        """It is computed, and in the index by now; or it will not be. Not an error for one that is not here."""
        sent = self._sent.get(row, {})
        hashes = sent.pop(ticket, None)
        if hashes is None:
            return
        others = set().union(*sent.values()) if sent else set()
        self._index.remove(self._slots[row], [each for each in hashes if each not in others])
        if not sent:
            del self._sent[row]

    def drop_row(self, row: int) -> None:
        """The worker is gone."""
        self._sent.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._index.remove_worker(slot)

    def find(self, hashes: tuple[int, ...], rows: Rows) -> Floats:
        """How many blocks of a prompt, from the first on, each of the rows is about to hold."""
        expected = np.zeros(len(rows))
        if self._sent:
            found = self._index.find(hashes)
            for place, row in enumerate(rows.tolist()):
                slot = self._slots.get(row)
                if slot is not None and slot < len(found):
                    expected[place] = found[slot]
        return expected
