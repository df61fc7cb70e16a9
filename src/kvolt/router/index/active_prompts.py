"""Prompts of the requests in flight, and the prefixes that they share. Pure; by reservation and row of
WorkerLoads.

Two uses: requests of one worker that share a prefix may read its KV at lower cost (`shared_kv_read`), and a prefix that
many requests share is worth a copy at another worker.

Uses the sampled hashes of `pending_blocks`: shared depths may be up to fifteen blocks short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvolt.router.index.pending_blocks import kept_depth, kept_hashes


class ActivePrompts:
    """See the module."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Row and sampled hashes, by reservation id."""
        self._num_requests: dict[int, int] = {}
        """Requests of all workers whose prompt has this hash."""
        self._num_readers: dict[int, dict[int, int]] = {}
        """The same by row."""

    def add_prompt(self, row: int, reservation_id: int, hashes: tuple[int, ...]) -> int:
        """Add a prompt; return its leading blocks that another request of the row has too."""
        sampled = kept_hashes(hashes)
        self._prompts[reservation_id] = (row, sampled)
        fleet, readers = self._num_requests, self._num_readers.setdefault(row, {})
        num_shared = 0
        for index, each in enumerate(sampled):
            fleet[each] = fleet.get(each, 0) + 1
            num_others = readers.get(each, 0)
            readers[each] = num_others + 1
            if num_others:
                num_shared = index + 1
        return kept_depth(num_shared - 1) if num_shared else 0

    def remove_prompt(self, reservation_id: int) -> int:
        """Remove a prompt; return its leading blocks that another request of the row still has. 0 if unknown."""
        row, sampled = self._prompts.pop(reservation_id, (0, ()))
        readers = self._num_readers.get(row, {})
        num_shared = 0
        for index, each in enumerate(sampled):
            _count_down(self._num_requests, each)
            if _count_down(readers, each):
                num_shared = index + 1
        return kept_depth(num_shared - 1) if num_shared else 0

    def drop_row(self, row: int) -> None:
        """Remove a worker with its prompts."""
        for reservation_id in [
            reservation_id for reservation_id, (its_row, _) in self._prompts.items() if its_row == row
        ]:
            self.remove_prompt(reservation_id)
        self._num_readers.pop(row, None)

    def shared_depths(self, hashes: tuple[int, ...]) -> list[tuple[int, int]]:
        """Pairs of depth in blocks and number of requests that share the prompt up to there, shortest first."""
        if not self._num_requests or not hashes or hashes[0] not in self._num_requests:
            return []
        depths = []
        for index, each in enumerate(kept_hashes(hashes)):
            count = self._num_requests.get(each)
            if count is None:
                break
            depths.append((kept_depth(index), count))
        return depths


class PrefixSharing(NamedTuple):
    """Sharing of one prompt's prefix with the requests in flight; depths in blocks."""

    depth: int = 0
    """Longest prefix that another request has."""
    hot_depth: int = 0
    """Prefix with the most shared blocks: depth times requests."""
    reuse: float = 0.0
    """Requests in flight with that prefix. By Little's law as many arrive during one answer."""


def prefix_sharing(counts: Sequence[tuple[int, int]]) -> PrefixSharing:
    """Summarize the result of `ActivePrompts.shared_depths`."""
    if not counts:
        return PrefixSharing()
    hot_depth, reuse = max(counts, key=lambda each: each[0] * each[1])
    return PrefixSharing(counts[-1][0], hot_depth, reuse)


def _count_down(counts: dict[int, int], key: int) -> int:
    """Decrement a count; return the rest."""
    rest = counts[key] - 1
    if rest:
        counts[key] = rest
    else:
        del counts[key]
    return rest
