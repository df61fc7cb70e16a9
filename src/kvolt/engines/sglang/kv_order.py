"""KV events of all ranks, in order with steps: a step waits for its events.

SGLang sends events and tokens over different sockets. Each step says how many batches of events were published before
it (`host.scheduler`) and is emitted once they have arrived, so that routers know a prompt's blocks before clients
have the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import dropwhile

from kvolt.core.kv_events import Cleared, KvChange
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.sglang.host.messages import KvSource
from kvolt.engines.wakeup import Wakeup

log = logging.getLogger(__name__)

_POLL_S = 0.002
_MAX_POLLS = 500
"""One second. Events that take longer are lost; steps no longer wait for them."""


class KvOrder:
    """See the module."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._feeds: dict[int, KvFeed] = {}
        self._abandoned: dict[int, int] = {}
        """Number of the batch up to which steps no longer wait, by rank."""
        self._blocks = HeldBlocks()
        self._changes: dict[int, list[KvChange]] = {}
        self._batch_read = Wakeup()
        self.num_cleared = 0
        """Number of Cleared events published by the engine."""

    @property
    def num_held(self) -> int:
        return self._blocks.num_blocks

    def add(self, rank: int, source: KvSource, page_size: int) -> KvFeed:
        feed = KvFeed(SourceEngine.SGLANG, page_size, source.endpoint, source.replay_endpoint or None)
        self._feeds[rank] = feed
        return feed

    async def follow(self, rank: int, feed: KvFeed) -> None:
        for changes in await feed.read_missed():  # SGLang publishes events when it starts
            self._add_changes(rank, changes)
        self._batch_read.set()
        num_lost = feed.num_lost
        async for changes in feed.changes():
            if feed.num_lost == num_lost:  # otherwise the feed cleared blocks because of a loss
                self.num_cleared += sum(isinstance(change, Cleared) for change in changes)
            num_lost = feed.num_lost
            self._add_changes(rank, changes)
            self._batch_read.set()

    def _add_changes(self, rank: int, changes: tuple[KvChange, ...]) -> None:
        if not self._blocks.num_of_rank(rank) and rank not in self._changes:
            # Nothing was published yet: a clear is redundant.
            changes = tuple(dropwhile(lambda change: isinstance(change, Cleared), changes))
        if new := self._blocks.deduplicate(rank, changes):
            self._changes.setdefault(rank, []).extend(new)
            self._on_change()

    def take(self) -> dict[int, list[KvChange]]:
        """Changes since the last call, by rank."""
        changes, self._changes = self._changes, {}
        return changes

    async def wait_batches(self, rank: int, number: int) -> None:
        """Wait until so many batches of a rank have been read or are lost."""
        feed = self._feeds.get(rank)
        if feed is None:
            return
        for _ in range(_MAX_POLLS):
            if max(feed.num_processed, self._abandoned.get(rank, 0)) >= number:
                return
            self._batch_read.clear()
            await self._batch_read.wait(_POLL_S)
        missing = number - feed.num_processed
        log.warning("KV events missing: batches=%d rank=%d", missing, rank)
        self._abandoned[rank] = number

    async def wait_cleared(self, number: int) -> None:
        """Wait until `num_cleared` exceeds this number and all changes were taken."""
        for _ in range(_MAX_POLLS):
            if (self.num_cleared > number and not self._changes) or not self._feeds:
                return
            self._batch_read.clear()
            await self._batch_read.wait(_POLL_S)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
