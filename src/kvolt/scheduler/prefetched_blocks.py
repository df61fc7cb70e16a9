"""PrefetchedBlocks: blocks received ahead of the admission of their requests.

Each chain of blocks is held for one request: *expected* until the request arrives or the time is over, then
*queued* while it waits, so that its prompt is not computed again. The blocks are not in use, so allocations
may evict them, those of the last request in the queue first; they then remain cached. Knows no clock and no
queue rules: times and queue positions are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvolt.core.ids import BlockKey, RequestId
from kvolt.kv import BlockId, BlockPool


@dataclass(slots=True)
class _Expected:
    blocks: list[BlockId]
    expires_at: float


@dataclass(slots=True)
class _Queued:
    blocks: list[BlockId]
    order: tuple[int, int, int]
    """Queue position of its request: smaller comes first."""


class PrefetchedBlocks:
    """See the module. At most one chain per request; a later one replaces an earlier one."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._expected: dict[RequestId, _Expected] = {}
        self._queued: dict[RequestId, _Queued] = {}
        self.num_blocks = 0
        """Blocks in all chains; a block in two chains counts twice."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every block, once per chain."""
        expected = (each.blocks for each in self._expected.values())
        queued = (each.blocks for each in self._queued.values())
        return chain.from_iterable(chain(expected, queued))

    def is_expected(self, request_id: RequestId) -> bool:
        return request_id in self._expected

    def hold_expected(self, request_id: RequestId, keys: Sequence[BlockKey], expires_at: float) -> None:
        """Hold the cached leading blocks of `keys` for a request that is about to arrive."""
        blocks = self._hold(keys)
        self.release(request_id)
        if blocks:
            self._expected[request_id] = _Expected(blocks, expires_at)

    def hold_queued(
        self, request_id: RequestId, keys: Sequence[BlockKey], order: tuple[int, int, int]
    ) -> None:
        """Keep the prefetched blocks that an arrived request can use, by its own `keys`.

        The held blocks are always a prefix of what the request finds, so no request waits for blocks held for
        itself.
        """
        blocks = self._hold(keys)
        self.release_expected(request_id)
        if blocks:
            self._queued[request_id] = _Queued(blocks, order)

    def move_queued(self, request_id: RequestId, order: tuple[int, int, int]) -> None:
        """Follow a request whose queue position changed."""
        queued = self._queued.get(request_id)
        if queued is not None:
            queued.order = order

    def release(self, request_id: RequestId) -> None:
        """Release the blocks of a request that was admitted, and holds its blocks itself, or has ended."""
        self.release_expected(request_id)
        queued = self._queued.pop(request_id, None)
        if queued is not None:
            self._drop(queued.blocks)

    def release_expected(self, request_id: RequestId) -> None:
        """Release the blocks of a request that will not arrive. No effect on a request that has arrived."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._drop(expected.blocks)

    def evict_last(self, spare: RequestId | None = None) -> bool:
        """Release the chain of an expected request, or else of the last request in the queue. False if
        nothing is left, except for the chain of `spare`, the first in the queue."""
        if self._expected:
            self.release_expected(next(reversed(self._expected)))
            return True
        last = max(self._queued, key=lambda each: self._queued[each].order, default=None)
        if last is None or last == spare:
            return False
        self.release(last)
        return True

    def can_free(self, count: int, spare: RequestId | None = None) -> bool:
        """Whether `count` blocks would be free after all evictions. Blocks that others hold too, such as
        shared prompt prefixes, stay in use and do not count."""
        if count > self.num_blocks:  # the usual outcome, and cheap
            return False
        queued = self._queued.get(spare) if spare is not None else None
        chains = Counter(self)
        if queued is not None:
            chains.subtract(queued.blocks)
        return count <= sum(self._pool.num_holders(block) == number for block, number in chains.items())

    def clear(self) -> None:
        """Release all chains."""
        while self.evict_last():
            pass

    # --- expiry

    def expire(self, now: float) -> None:
        """Release the chains of requests that did not arrive in time."""
        for request_id in [each for each, held in self._expected.items() if held.expires_at <= now]:
            self.release_expected(request_id)

    @property
    def next_expiry(self) -> float | None:
        return min((held.expires_at for held in self._expected.values()), default=None)

    # ---

    def _hold(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        blocks = self._pool.acquire(keys)
        self.num_blocks += len(blocks)
        return blocks

    def _drop(self, blocks: list[BlockId]) -> None:
        self._pool.release(reversed(blocks))
        self.num_blocks -= len(blocks)
