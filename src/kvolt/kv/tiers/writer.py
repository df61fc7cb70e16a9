"""TierWriter: blocks of the host that wait for a tier below it, written a batch at a time and at leisure.

Owns which of them are worth it, in which order they go, and what becomes of them when that tier will not take them:
it is asked again after a pause, and blocks that the host drops meanwhile are not kept. Those that are next stay in
the host until they are written, whatever else comes to it: the blocks that go for those lie below, or are not worth
it. They are a part of the host's slots at most. Bounded by the host's size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.kv.tiers.eviction import TouchFilter
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBooks
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
"""After a tier would not take blocks, before it is asked again."""
_FLUSH_S = 5.0
"""For what waits, when all ends."""
_MANY_SKIPPED = 1024
"""Sightings after which a tier that got nothing is reported."""
_MOST_NEXT = 128
"""Blocks that stay for one tier: who looks for one that can go passes them by, each time."""


class TierWriter:
    """See the module. `start` it after the tier, and `close` it before."""

    def __init__(
        self, lower: LowerTier, host: TierBooks, memory: SlotMemory, touches: int, at_once: int
    ) -> None:
        """`touches`: how often a block is to be seen before it is worth it. `at_once`: blocks in a batch."""
        self.lower = lower
        self._host = host
        self._memory = memory
        self._at_once = at_once
        self._touches = touches
        self._filter: TouchFilter[BlockKey] = TouchFilter(touches, 4 * host.num_slots, 4 * host.num_slots)
        self._waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self._next: set[BlockKey] = set()
        """The first that wait, as many as may stay: held in the host."""
        self.waiting_share = 0.0
        """Of the host's slots, for blocks that are next and stay until then."""
        self._has_waiting = asyncio.Event()
        self._closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._num_clears = 0
        self._is_refused = False
        """Whether the last batch was."""
        self.on_change: Callable[[], None] = lambda: None
        """Told when blocks have come to the tier, or gone from it."""
        self.num_dropped = 0
        """Blocks that were worth it and went before it was their turn."""
        self.num_skipped = 0
        """Sightings of blocks that were not enough to write the block."""
        self._has_passed = False
        """A block was seen often enough."""

    def start(self, crew: Crew) -> None:
        self._writing = crew.start(self._write_on(), f"write to {self.lower.tier}")

    async def close(self) -> None:
        """What waits is written, as far as that is quick."""
        self._closing.set()
        self._has_waiting.set()
        if 0 < self.num_skipped < _MANY_SKIPPED:
            self._report_nothing_written()
        if self._writing is None:
            return
        await asyncio.wait([self._writing], timeout=_FLUSH_S)
        try:
            async with asyncio.timeout(_FLUSH_S):
                while self._waiting or self.lower.has_chores:
                    if not await self._write_batch():
                        break
        except TimeoutError:
            log.warning(
                "%d blocks were not written to the %s tier in time", len(self._waiting), self.lower.tier
            )

    def want(self, key: BlockKey) -> None:
        """It was seen: written in its turn, if that is worth it."""
        if self.lower.knows(key) or not self._host.has(key):
            return
        if not self._filter.sees(key):
            self.num_skipped += 1
            if self.num_skipped == _MANY_SKIPPED:
                self._report_nothing_written()
            return
        self._has_passed = True
        self._waiting[key] = None
        if len(self._waiting) > self._host.num_slots:
            self._let_go([self._waiting.popitem(last=False)[0]])
            self.num_dropped += 1
        self._hold_next()
        self._has_waiting.set()

    def _report_nothing_written(self) -> None:
        if not self._has_passed:
            log.warning(
                "nothing is written to the %s tier: skipped=%d blocks, each seen fewer than %d times; "
                "set tiers.%s_touches to 1 to write every block",
                self.lower.tier,
                self.num_skipped,
                self._touches,
                self.lower.tier,
            )

    def wake(self) -> None:
        """The tier may have something to clear up."""
        self._has_waiting.set()

    def clear(self) -> int:
        """Forget what waits, what is on its way, and what is there; how many of the last."""
        self._num_clears += 1
        self._let_go(self._waiting)
        self._waiting.clear()
        self.wake()
        return self.lower.forget()

    # ---

    def _hold_next(self) -> None:
        """As many of the first as may stay. What has gone before it was its turn waits no longer."""
        most = 0 if self._is_refused else min(int(self.waiting_share * self._host.num_slots), _MOST_NEXT)
        while len(self._next) < min(most, len(self._waiting)):
            key = next(islice(self._waiting, len(self._next), None))
            if self._host.has(key):
                self._host.hold([key], is_asked=False)
                self._next.add(key)
            else:
                del self._waiting[key]
                self.num_dropped += 1

    def _let_go(self, keys: Iterable[BlockKey]) -> None:
        """They stay no longer."""
        going = [key for key in keys if key in self._next]
        self._next.difference_update(going)
        self._host.release(going)

    def _put_back(self, keys: Sequence[BlockKey], cleared: int) -> None:
        """At the end: others may have more luck."""
        if cleared == self._num_clears:
            free = self._host.num_slots - len(self._waiting)
            self._waiting.update(dict.fromkeys(keys[: max(free, 0)]))

    async def _write_on(self) -> None:
        """Until it `is_closing`: a batch that has begun is ended."""
        while not self._is_closing:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while not self._is_closing and (self._waiting or self.lower.has_chores):
                if not await self._write_batch():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_S):
                            await self._closing.wait()

    @property
    def _is_closing(self) -> bool:
        return self._closing.is_set()

    async def _write_batch(self) -> bool:
        """What waits first; whether the tier takes blocks."""
        keys: list[BlockKey] = []
        while self._waiting and len(keys) < self._at_once:
            key, _ = self._waiting.popitem(last=False)
            if self.lower.knows(key):
                self._let_go([key])
            elif self._host.has(key):
                keys.append(key)
            else:
                self._let_go([key])
                self.num_dropped += 1
        blocks, cleared = [self._host.block(key) for key in keys], self._num_clears
        sums = [self._host.checksum(key) for key in keys]
        slots = np.asarray(self._host.hold(keys, is_asked=False), dtype=np.int64)
        self._let_go(keys)
        self._hold_next()
        try:
            await self.lower.write(blocks, sums, self._memory, slots)
        except Exception as error:  # the next may be better: nobody else would go on with this
            no_room = isinstance(error, KvoltError) and error.fields.get("reason") == "no_room"
            self.lower.stats.failures["no_room" if no_room else "unwritten"] += len(blocks)
            told = error.message if isinstance(error, KvoltError) else repr(error)
            level = logging.DEBUG if self._is_refused else logging.WARNING  # once, until it takes some again
            log.log(
                level, "%d blocks were not written to the %s tier: %s", len(blocks), self.lower.tier, told
            )
            self._is_refused = True
            self._let_go(self._waiting)  # for a tier that takes none the host keeps none
            self._put_back(keys, cleared)
            return False
        finally:
            self._host.release(keys)
            if cleared != self._num_clears:
                self.lower.forget(keys)
                self._host.forget(keys)  # they could not go while they were read
            self.on_change()
        self._is_refused = False
        return True
