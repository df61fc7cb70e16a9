"""Prompts of the requests under way, and how much of them is shared. Pure, by tickets and rows of a LoadBook.

Two uses. Requests of one worker that share a prefix may read it more cheaply than each its own (`shared_kv_read`).
And a prefix that many requests of the fleet begin with is worth a copy at another worker, where later ones find it.

As `expected` keeps only some of a prompt's hashes, what is found may be up to fifteen blocks less than there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvolt.router.index.pending_blocks import kept_depth, kept_hashes


class ActivePrompts:
    """See the module."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Row and kept hashes, by ticket."""
        self._num_requests: dict[int, int] = {}
        """Requests of the fleet whose prompt has this hash."""
        self._num_readers: dict[int, dict[int, int]] = {}
        """The same by row."""

    def add(self, row: int, ticket: int, hashes: tuple[int, ...]) -> int:
        """Blocks of this prompt that another request of the row has too."""
        kept = kept_hashes(hashes)
        self._prompts[ticket] = (row, kept)
        fleet, readers = self._num_requests, self._num_readers.setdefault(row, {})
        num_shared = 0
        for index, each in enumerate(kept):
            fleet[each] = fleet.get(each, 0) + 1
            others = readers.get(each, 0)
            readers[each] = others + 1
            if others:
                num_shared = index + 1
        return kept_depth(num_shared - 1) if num_shared else 0

    def remove(self, ticket: int) -> int:
        """Undo `add`: blocks of this prompt that another request of the row still has. 0 for one that is not here."""
        row, kept = self._prompts.pop(ticket, (0, ()))
        readers = self._num_readers.get(row, {})
        num_shared = 0
        for index, each in enumerate(kept):
            _count_down(self._num_requests, each)
            if _count_down(readers, each):
                num_shared = index + 1
        return kept_depth(num_shared - 1) if num_shared else 0

    def drop_row(self, row: int) -> None:
        """The worker is gone."""
        for ticket in [ticket for ticket, (of_row, _) in self._prompts.items() if of_row == row]:
            self.remove(ticket)
        self._num_readers.pop(row, None)

    def sharing(self, hashes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Depth in blocks, and requests under way whose prompts are the same up to there; from the first block on."""
        if not self._num_requests or not hashes or hashes[0] not in self._num_requests:
            return []
        found = []
        for index, each in enumerate(kept_hashes(hashes)):
            count = self._num_requests.get(each)
            if count is None:
                break
            found.append((kept_depth(index), count))
        return found


class Sharing(NamedTuple):
    """Of one prompt, in blocks from its first on."""

    depth: int = 0
    """That another request under way has too."""
    hot_depth: int = 0
    """The prefix of it that most requests have for its length."""
    reuse: float = 0.0
    """Requests under way that have that. As many come while an answer lasts (Little's law)."""


def sharing_of(counts: Sequence[tuple[int, int]]) -> Sharing:
    """By the counts of `ActivePrompts.sharing`."""
    if not counts:
        return Sharing()
    hot_depth, reuse = max(counts, key=lambda each: each[0] * each[1])
    return Sharing(counts[-1][0], hot_depth, reuse)


def _count_down(counts: dict[int, int], key: int) -> int:
    """One less; how many are left."""
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left
