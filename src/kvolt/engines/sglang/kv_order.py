"""KvOrder: the KV events of all ranks, and how far they have come: steps wait for those that belong to them.

SGLang's events and tokens come by different sockets. Each step says how many batches of events went out before it
(`scheduler`); it is told when they are here, so that no client has an answer whose blocks a router has not heard of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import dropwhile

from kvolt.core.kv_events import Cleared, KvChange
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.sglang.host.messages import KvSource
from kvolt.engines.wakeup import Wakeup

log = logging.getLogger(__name__)

_LOOK_S = 0.002
_NUM_LOOKS = 500
"""A second: a rank that is silent for longer has lost its events, and steps wait for them no more."""


class KvOrder:
    """See the module. `close` it."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._feeds: dict[int, KvFeed] = {}
        self._given_up: dict[int, int] = {}
        """Up to which batch of a rank steps wait no more."""
        self._blocks = HeldBlocks()
        self._changes: dict[int, list[KvChange]] = {}
        self._came = Wakeup()
        self.num_cleared = 0
        """How often the engine has said that it forgot its blocks."""

    @property
    def num_held(self) -> int:
        return self._blocks.num_blocks

    def add(self, rank: int, source: KvSource, page_size: int) -> KvFeed:
        feed = KvFeed(Engine.SGLANG, page_size, source.endpoint, source.replay_endpoint or None)
        self._feeds[rank] = feed
        return feed

    async def follow(self, rank: int, feed: KvFeed) -> None:
        for changes in await feed.catch_up():  # SGLang says something when it starts
            self._note(rank, changes)
        self._came.ring()
        num_lost = feed.num_lost
        async for changes in feed.changes():
            if feed.num_lost == num_lost:  # else the feed itself takes back what it has told
                self.num_cleared += sum(isinstance(change, Cleared) for change in changes)
            num_lost = feed.num_lost
            self._note(rank, changes)
            self._came.ring()

    def _note(self, rank: int, changes: tuple[KvChange, ...]) -> None:
        if not self._blocks.num_of(rank) and rank not in self._changes:
            # As when it starts: nobody was told of anything.
            changes = tuple(dropwhile(lambda change: isinstance(change, Cleared), changes))
        if news := self._blocks.once(rank, changes):
            self._changes.setdefault(rank, []).extend(news)
            self._on_change()

    def take(self) -> dict[int, list[KvChange]]:
        """By rank, what was not taken before."""
        changes, self._changes = self._changes, {}
        return changes

    async def reached(self, rank: int, number: int) -> None:
        """Until so many batches of a rank have been read, or will not come."""
        feed = self._feeds.get(rank)
        if feed is None:
            return
        for _ in range(_NUM_LOOKS):
            if max(feed.num_passed, self._given_up.get(rank, 0)) >= number:
                return
            self._came.silence()
            await self._came.wait(_LOOK_S)
        missing = number - feed.num_passed
        log.warning("%d batches of KV events of rank %d do not come", missing, rank)
        self._given_up[rank] = number

    async def cleared_since(self, number: int) -> None:
        """Until that the blocks are gone was said more often than this, and told to who reads."""
        for _ in range(_NUM_LOOKS):
            if (self.num_cleared > number and not self._changes) or not self._feeds:
                return
            self._came.silence()
            await self._came.wait(_LOOK_S)

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.close()
