"""TierWriter: writes blocks of the host tier to one lower tier in the background, in batches.

Decides which blocks are written and in which order. If the tier rejects a batch, it is retried after a pause; blocks
evicted from the host in between are dropped. The next blocks in order are held in the host until written, so that
eviction takes other blocks; they use a limited share of the slots. The queue is bounded by the host's size.
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
from kvolt.kv.tiers.slot_table import SlotTable
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_PAUSE_S = 5.0
"""Pause after a rejected batch."""
_FLUSH_S = 5.0
"""Time limit for pending writes on close."""
_MANY_SKIPPED = 1024
"""Sightings without any admitted block after which a warning is logged."""
_MAX_HELD = 128
"""Held blocks per tier, since each eviction scans past them."""


class TierWriter:
    """See the module. `start` after the tier, `close` before it."""

    def __init__(
        self, lower: LowerTier, host: SlotTable, memory: SlotMemory, touches: int, batch_blocks: int
    ) -> None:
        """`touches`: sightings before a block is written."""
        self.lower = lower
        self._host = host
        self._memory = memory
        self._batch_blocks = batch_blocks
        self._touches = touches
        self._filter: TouchFilter[BlockKey] = TouchFilter(touches, 4 * host.num_slots, 4 * host.num_slots)
        self._waiting: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: set[BlockKey] = set()
        """Held blocks: the first ones in the queue."""
        self.pending_share = 0.0
        """Share of the host's slots for held blocks."""
        self._has_waiting = asyncio.Event()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._num_clears = 0
        self._is_rejected = False
        """Whether the tier rejected the last batch."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change of the tier."""
        self.num_dropped = 0
        """Admitted blocks evicted before they were written."""
        self.num_skipped = 0
        """Sightings of blocks that were not admitted."""
        self._has_admitted = False
        """At least one block was admitted."""

    def start(self, task_group: TaskGroup) -> None:
        self._task = task_group.start(self._run(), f"write to {self.lower.tier}")

    async def close(self) -> None:
        """Write pending blocks within a time limit."""
        self._closing.set()
        self._has_waiting.set()
        if 0 < self.num_skipped < _MANY_SKIPPED:
            self._report_nothing_written()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=_FLUSH_S)
        try:
            async with asyncio.timeout(_FLUSH_S):
                while self._waiting or self.lower.has_pending_work:
                    if not await self._write_batch():
                        break
        except TimeoutError:
            log.warning("close timed out: tier=%s unwritten=%d", self.lower.tier, len(self._waiting))

    def record_sighting(self, key: BlockKey) -> None:
        """Count a sighting of a block and queue it if it is admitted."""
        if self.lower.has_or_pending(key) or not self._host.has(key):
            return
        if not self._filter.record_sighting(key):
            self.num_skipped += 1
            if self.num_skipped == _MANY_SKIPPED:
                self._report_nothing_written()
            return
        self._has_admitted = True
        self._waiting[key] = None
        if len(self._waiting) > self._host.num_slots:
            self._release([self._waiting.popitem(last=False)[0]])
            self.num_dropped += 1
        self._hold_first()
        self._has_waiting.set()

    def _report_nothing_written(self) -> None:
        if not self._has_admitted:
            log.warning(
                "no block written to tier: tier=%s skipped=%d touches=%d; "
                "set tiers.%s_touches to 1 to write all blocks",
                self.lower.tier,
                self.num_skipped,
                self._touches,
                self.lower.tier,
            )

    def wake(self) -> None:
        """Run the writer, since the tier may have pending cleanup."""
        self._has_waiting.set()

    def clear(self) -> int:
        """Drop pending blocks and remove all blocks from the tier; return how many were removed."""
        self._num_clears += 1
        self._release(self._waiting)
        self._waiting.clear()
        self.wake()
        return self.lower.forget()

    def _hold_first(self) -> None:
        """Hold the first queued blocks up to the limit; drop queued blocks that were evicted."""
        limit = 0 if self._is_rejected else min(int(self.pending_share * self._host.num_slots), _MAX_HELD)
        while len(self._held) < min(limit, len(self._waiting)):
            key = next(islice(self._waiting, len(self._held), None))
            if self._host.has(key):
                self._host.hold([key], is_access=False)
                self._held.add(key)
            else:
                del self._waiting[key]
                self.num_dropped += 1

    def _release(self, keys: Iterable[BlockKey]) -> None:
        held = [key for key in keys if key in self._held]
        self._held.difference_update(held)
        self._host.release(held)

    def _requeue(self, keys: Sequence[BlockKey], cleared: int) -> None:
        """Append rejected blocks to the end of the queue."""
        if cleared == self._num_clears:
            free = self._host.num_slots - len(self._waiting)
            self._waiting.update(dict.fromkeys(keys[: max(free, 0)]))

    async def _run(self) -> None:
        """Write batches until closing; a started batch completes."""
        while not self._is_closing:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while not self._is_closing and (self._waiting or self.lower.has_pending_work):
                if not await self._write_batch():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_S):
                            await self._closing.wait()

    @property
    def _is_closing(self) -> bool:
        return self._closing.is_set()

    async def _write_batch(self) -> bool:
        """Write the first queued blocks; return whether the tier accepted them."""
        keys: list[BlockKey] = []
        while self._waiting and len(keys) < self._batch_blocks:
            key, _ = self._waiting.popitem(last=False)
            if self.lower.has_or_pending(key):
                self._release([key])
            elif self._host.has(key):
                keys.append(key)
            else:
                self._release([key])
                self.num_dropped += 1
        blocks, cleared = [self._host.block(key) for key in keys], self._num_clears
        sums = [self._host.checksum(key) for key in keys]
        slots = np.asarray(self._host.hold(keys, is_access=False), dtype=np.int64)
        self._release(keys)
        self._hold_first()
        try:
            await self.lower.write(blocks, sums, self._memory, slots)
        except Exception as error:  # must not end the writer task
            no_room = isinstance(error, KvoltError) and error.fields.get("reason") == "no_room"
            self.lower.stats.failures["no_room" if no_room else "unwritten"] += len(blocks)
            reason = error.message if isinstance(error, KvoltError) else repr(error)
            level = logging.DEBUG if self._is_rejected else logging.WARNING  # once, until a batch succeeds
            log.log(level, "write rejected: tier=%s blocks=%d error=%s", self.lower.tier, len(blocks), reason)
            self._is_rejected = True
            self._release(self._waiting)  # hold no blocks for a tier that rejects them
            self._requeue(keys, cleared)
            return False
        finally:
            self._host.release(keys)
            if cleared != self._num_clears:
                self.lower.forget(keys)
                self._host.forget(keys)  # held during the write, so `clear` skipped them
            self.on_change()
        self._is_rejected = False
        return True
