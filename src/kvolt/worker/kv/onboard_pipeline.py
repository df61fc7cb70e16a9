"""Onboards blocks from the end of a prompt while the engine computes it from the start.

Blocks are copied part by part into an allocation and attached to the request, which skips them. Neither side waits
for the other, so their relative speed need not be known.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence

from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Tier
from kvolt.engines.contract import KvAllocation, KvTierable
from kvolt.engines.wakeup import Wakeup
from kvolt.kv.tiers.cache import OnboardResult, TieredCache
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Scope

log = logging.getLogger(__name__)

_PARTS = 8
"""Approximate number of parts: a late part is computed instead, and each part costs a message."""
_MAX_PARTS = 2
"""Parts fetched concurrently, to hide the latency of remote tiers."""
_POLL_S = 0.25
"""Interval of checks, while no part arrives, whether the request can still use one."""


class OnboardPipeline:
    """Pipeline of one prompt. See the module."""

    def __init__(
        self, engine: KvTierable, cache: TieredCache, request_id: RequestId, allocation: KvAllocation
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._request_id = request_id
        self._allocation = allocation
        self._num_fetched = 0
        """Blocks at the end of the allocation that have been filled."""
        self._num_computed = 0
        self._was_known = False
        self._num_attached = 0
        self._fetched_by_tier: Counter[Tier] = Counter()
        self._num_pending = 0
        """Calls of `attach_kv` in flight."""
        self._is_uncertain = False
        """Whether a call of `attach_kv` was cancelled, so that its effect is unknown."""
        self._is_obsolete = False
        """Whether the request can use no further block."""
        self._wakeup = Wakeup()

    @property
    def num_filled(self) -> int:
        """Blocks of the allocation to commit to the prefix cache at the end: all or none. None if some were attached,
        or the prompt is computed."""
        is_whole = self._num_fetched == len(self._allocation.blocks) and not self._is_uncertain
        return self._num_fetched if is_whole and not self._num_attached and not self._num_computed else 0

    @property
    def fetched(self) -> OnboardResult:
        """Blocks that need not be computed."""
        left = count = self._num_attached or self.num_filled
        used: list[tuple[Tier, int]] = []
        for tier, num_fetched in sorted(self._fetched_by_tier.items()):
            used.append((tier, min(num_fetched, left)))
            left -= used[-1][1]
        return OnboardResult(count, tuple(each for each in used if each[1]))

    async def run(self, blocks: Sequence[TierBlock], timeout_s: float) -> None:
        """Onboard the blocks of the allocation. Nothing is in flight afterwards, also after an error."""
        try:
            async with asyncio.timeout(timeout_s), Scope("onboarding") as scope:
                fetching = scope.start(self._fetch(blocks), "fetch")
                num_sent, is_due = -1, True
                while not self._is_obsolete and not (fetching.done() and num_sent == self._num_fetched):
                    # Concurrently: an engine handles all calls between two steps.
                    if num_sent != self._num_fetched or (is_due and not self._num_pending):
                        num_sent = self._num_fetched
                        scope.start(self._attach(), "attach")
                    is_due = not await self._wakeup.wait(_POLL_S)
                    self._wakeup.clear()
                while self._num_pending:
                    await self._wakeup.wait()
                    self._wakeup.clear()
                scope.cancel()
        except TimeoutError:
            log.warning(
                "onboarding timed out: blocks=%d fetched=%d timeout_s=%g",
                len(blocks),
                self._num_fetched,
                timeout_s,
            )

    async def _fetch(self, blocks: Sequence[TierBlock]) -> None:
        """Fetch parts from the last to the first, up to an incomplete part: earlier ones are useless without it."""
        size = max(min(self._cache.host.batch_blocks, -(-len(blocks) // _PARTS)), 1)
        ends = deque(range(len(blocks), 0, -size))
        in_flight: deque[tuple[int, asyncio.Task[OnboardResult]]] = deque()
        async with Scope("parts") as scope:
            while ends or in_flight:
                while ends and len(in_flight) < _MAX_PARTS:
                    end = ends.popleft()
                    part = slice(max(end - size, 0), end)
                    fetching = self._cache.onboard(blocks[part], self._allocation.blocks[part])
                    in_flight.append((end - part.start, scope.start(fetching, "fetch")))
                num_blocks, task = in_flight.popleft()
                fetched = await task
                if fetched.num_blocks < num_blocks:
                    break
                self._num_fetched += num_blocks
                self._fetched_by_tier.update(dict(fetched.by_tier))
                self._wakeup.set()
            scope.cancel()
        self._wakeup.set()

    async def _attach(self) -> None:
        """Attach the fetched blocks to the request."""
        num_sent = self._num_fetched  # more may come while the engine answers
        self._num_pending += 1
        try:
            attached = await self._engine.attach_kv(self._allocation, num_sent, self._request_id)
        except asyncio.CancelledError:
            self._is_uncertain = True
            raise
        finally:
            self._num_pending -= 1
            self._wakeup.set()
        self._num_attached += attached.num_attached
        self._num_computed = max(self._num_computed, attached.num_reached)
        is_gone = self._was_known and not attached.is_known
        self._was_known = attached.is_known
        num_left = self._allocation.num_present + len(self._allocation.blocks) - num_sent
        self._is_obsolete = self._is_obsolete or is_gone or num_left <= self._num_computed
