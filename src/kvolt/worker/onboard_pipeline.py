"""OnboardPipeline: onboards blocks from the end of a prompt while the engine computes it from the start.

A part at a time is brought into blocks that the engine made room for, and given to the request, which goes on behind
it once it is there. Which of the two is the faster need not be known: nobody waits for the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence

from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Tier
from kvolt.engines.contract import KvRoom, KvTierable
from kvolt.engines.wakeup import Wakeup
from kvolt.kv.tiers.cache import Fetched, TieredCache
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Scope

log = logging.getLogger(__name__)

_PARTS = 8
"""That a prompt's blocks come in, about: what is told late is computed, and each part costs a message."""
_UNDER_WAY = 2
"""Parts at a time: far tiers answer late, and not slower for being asked twice."""
_LOOK_S = 0.25
"""While a part does not come, how often the request is asked whether it is still of use."""


class OnboardPipeline:
    """One prompt's. See the module."""

    def __init__(self, engine: KvTierable, cache: TieredCache, request_id: RequestId, room: KvRoom) -> None:
        self._engine = engine
        self._cache = cache
        self._request_id = request_id
        self._room = room
        self._num_last = 0
        """Blocks at the end of the room that hold what they should."""
        self._num_reached = 0
        self._was_here = False
        self._num_taken = 0
        self._came: Counter[Tier] = Counter()
        self._num_asked = 0
        """Calls of the engine that it has not answered."""
        self._is_uncertain = False
        """Whether the engine was told of blocks, and nobody has heard whether it took some."""
        self._is_useless = False
        """Whether the request could use no more."""
        self._news = Wakeup()

    @property
    def num_filled(self) -> int:
        """Blocks of the room that can be found, now that nobody fills them: all or none. None where some were taken, or
        the prompt is being computed all the same."""
        is_whole = self._num_last == len(self._room.blocks) and not self._is_uncertain
        return self._num_last if is_whole and not self._num_taken and not self._num_reached else 0

    @property
    def fetched(self) -> Fetched:
        """What need not be computed."""
        left = count = self._num_taken or self.num_filled
        used: list[tuple[Tier, int]] = []
        for tier, came in sorted(self._came.items()):
            used.append((tier, min(came, left)))
            left -= used[-1][1]
        return Fetched(count, tuple(each for each in used if each[1]))

    async def bring(self, blocks: Sequence[TierBlock], timeout_s: float) -> None:
        """`blocks`: those that the room is for. Nothing is under way after this, however it ends."""
        try:
            async with asyncio.timeout(timeout_s), Scope("ahead") as scope:
                fetching = scope.start(self._fetch(blocks), "fetch")
                num_given, is_due = -1, True
                while not self._is_useless and not (fetching.done() and num_given == self._num_last):
                    # At once: an engine hears between its steps, all that it was told until then.
                    if num_given != self._num_last or (is_due and not self._num_asked):
                        num_given = self._num_last
                        scope.start(self._give(), "give")
                    is_due = not await self._news.wait(_LOOK_S)
                    self._news.silence()
                while self._num_asked:
                    await self._news.wait()
                    self._news.silence()
                scope.cancel()
        except TimeoutError:
            log.warning("of %d blocks %d came within %g s", len(blocks), self._num_last, timeout_s)

    async def _fetch(self, blocks: Sequence[TierBlock]) -> None:
        """From the last on, up to a part that does not come whole: what lies before it is of no use without it."""
        size = max(min(self._cache.host.at_once, -(-len(blocks) // _PARTS)), 1)
        ends = deque(range(len(blocks), 0, -size))
        under_way: deque[tuple[int, asyncio.Task[Fetched]]] = deque()
        async with Scope("parts") as scope:
            while ends or under_way:
                while ends and len(under_way) < _UNDER_WAY:
                    end = ends.popleft()
                    part = slice(max(end - size, 0), end)
                    fetching = self._cache.fetch(blocks[part], self._room.blocks[part])
                    under_way.append((end - part.start, scope.start(fetching, "fetch")))
                num_blocks, task = under_way.popleft()
                fetched = await task
                if fetched.num_blocks < num_blocks:
                    break
                self._num_last += num_blocks
                self._came.update(dict(fetched.by_tier))
                self._news.ring()
            scope.cancel()
        self._news.ring()

    async def _give(self) -> None:
        """What is here, to the request."""
        num_given = self._num_last  # more may come while the engine answers
        self._num_asked += 1
        try:
            taken = await self._engine.take_kv(self._room, num_given, self._request_id)
        except asyncio.CancelledError:
            self._is_uncertain = True
            raise
        finally:
            self._num_asked -= 1
            self._news.ring()
        self._num_taken += taken.num_taken
        self._num_reached = max(self._num_reached, taken.num_reached)
        is_gone = self._was_here and not taken.is_here
        self._was_here = taken.is_here
        num_left = self._room.num_present + len(self._room.blocks) - num_given
        self._is_useless = self._is_useless or is_gone or num_left <= self._num_reached
