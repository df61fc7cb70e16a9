"""Arrivals: blocks received for requests that are not admitted yet.

Owns the chains of blocks that stay in the pool for one request each: *expected* until the request is here or a time is
over, then *queued* for as long as it waits. They stay so that its prompt is not computed a second time. Nobody reads
them, so whoever is in need of blocks may have them: what is kept for the last in the queue is given up first, and is
then merely cached. Knows no clock and no rules of the queue: times and places in it are told.
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
    """Its request's place: smaller goes first."""


class Arrivals:
    """See the module. At most one chain for a request; a later one takes the place of an earlier one."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._expected: dict[RequestId, _Expected] = {}
        self._queued: dict[RequestId, _Queued] = {}
        self.num_blocks = 0
        """In all chains: one that is in two counts twice."""

    def __iter__(self) -> Iterator[BlockId]:
        """Every block, as often as it is held."""
        expected = (each.blocks for each in self._expected.values())
        queued = (each.blocks for each in self._queued.values())
        return chain.from_iterable(chain(expected, queued))

    def expects(self, request_id: RequestId) -> bool:
        return request_id in self._expected

    def expect(self, request_id: RequestId, keys: Sequence[BlockKey], expires_at: float) -> None:
        """Keep what there is of these blocks, from the first on, for a request that is about to come."""
        blocks = self._hold(keys)
        self.let_go(request_id)
        if blocks:
            self._expected[request_id] = _Expected(blocks, expires_at)

    def queue(self, request_id: RequestId, keys: Sequence[BlockKey], order: tuple[int, int, int]) -> None:
        """A request has come that was expected: of what was kept for it that stays which it can use, by its own `keys`.

        What is kept is then always a part of what it finds, so that nobody waits for blocks kept for itself.
        """
        blocks = self._hold(keys)
        self.cancel(request_id)
        if blocks:
            self._queued[request_id] = _Queued(blocks, order)

    def let_go(self, request_id: RequestId) -> None:
        """Its request is admitted, and holds its blocks itself, or is gone."""
        self.cancel(request_id)
        queued = self._queued.pop(request_id, None)
        if queued is not None:
            self._release(queued.blocks)

    def cancel(self, request_id: RequestId) -> None:
        """It will not come. Nothing changes for a request that has."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._release(expected.blocks)

    def give_up(self, spared: RequestId | None = None) -> bool:
        """Let go of what is kept for the last in the queue; before that, of what is not in it. False when nothing is
        left, but perhaps what is kept for `spared`: the first in the queue."""
        if self._expected:
            self.cancel(next(reversed(self._expected)))
            return True
        last = max(self._queued, key=lambda each: self._queued[each].order, default=None)
        if last is None or last == spared:
            return False
        self.let_go(last)
        return True

    def can_free(self, count: int, spared: RequestId | None = None) -> bool:
        """Whether so many blocks would be free after all that `give_up` can do. Those that others hold as well, as the
        beginning of prompts that many share, stay: for them nothing is to be given up."""
        if count > self.num_blocks:  # which is the usual end, and costs nothing
            return False
        queued = self._queued.get(spared) if spared is not None else None
        chains = Counter(self)
        if queued is not None:
            chains.subtract(queued.blocks)
        return count <= sum(self._pool.num_holders(block) == number for block, number in chains.items())

    def clear(self) -> None:
        """Nobody is to find these blocks any more."""
        while self.give_up():
            pass

    # --- time

    def expire(self, now: float) -> None:
        """Requests that have not come in time will not come."""
        for request_id in [each for each, held in self._expected.items() if held.expires_at <= now]:
            self.cancel(request_id)

    @property
    def next_expiry(self) -> float | None:
        return min((held.expires_at for held in self._expected.values()), default=None)

    # ---

    def _hold(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        blocks = self._pool.acquire(keys)
        self.num_blocks += len(blocks)
        return blocks

    def _release(self, blocks: list[BlockId]) -> None:
        self._pool.release(reversed(blocks))
        self.num_blocks -= len(blocks)
