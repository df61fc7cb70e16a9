"""PoolTier: a pool that the workers of a host share (`PoolServer`), as a tier below a worker's own host memory.

Knows which blocks the pool has as far as it has asked: others write there, and the pool lets blocks go, so that a guess
may be wrong, which a read corrects. A pool that has gone is a tier without blocks, until it is there again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvolt.core.errors import KvoltError, NetworkFault
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.object_store.known_keys import KnownKeys
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.slot_reads import offer_slots, read_brought, withdraw
from kvolt.kv.shared_pool.wire import (
    MOST_BLOCKS,
    Answer,
    Bring,
    Brought,
    Done,
    Found,
    Keep,
    Kept,
    Look,
    Suspect,
    WireBlock,
)
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_TRANSFER_S = 30.0
_ANSWER_S = 35.0
_LOOK_S = 0.5
_PATIENCE_S = 2.0
"""A read that is given up after this was too slow; before, somebody did not want it any more."""


class PoolTier:
    """A `LowerTier`."""

    tier = Tier.PEER
    look_s: float | None = 0.002
    num_slots = None
    has_chores = False

    def __init__(self, path: Path, shape: BlockShape, now: Callable[[], float]) -> None:
        self._link = PoolLink(path, shape, now)
        self.stats = TierStats()
        self._known = KnownKeys()
        self._writing: set[BlockKey] = set()
        self._agent = TransferAgent()
        self._thread = TierThread("kv-pool")
        self._link.on_lost = self._known.forget
        self._link.on_late = self._decline

    def __len__(self) -> int:
        return len(self._known)

    @property
    def pool(self) -> InstanceId | None:
        """Under which name the pool that is reached now tells routers of its blocks; None for one that does not."""
        return self._link.pool

    def on_pool(self, told: Callable[[], None]) -> None:
        """Call this when that has changed."""
        self._link.on_pool = told

    async def start(self) -> None:
        """ConfigError where the pool is for other blocks. One that is not there is looked for again later."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._link.connect()
        except (NetworkFault, TimeoutError) as error:
            log.warning("the shared pool is not there yet: %s", str(error))
        self._link.stay()

    async def close(self) -> None:
        await self._link.close()
        await asyncio.to_thread(self._agent.close)
        await self._thread.close()

    def has(self, key: BlockKey) -> bool:
        return key in self._known

    def knows(self, key: BlockKey) -> bool:
        return key in self._known or key in self._writing

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        start = self._known.num_known(keys)
        asked = keys[start : start + MOST_BLOCKS]
        if not asked:
            return
        try:
            found = await self._link.ask(Look(tuple(asked), worth_s), Found, _LOOK_S)
        except KvoltError as error:
            log.debug("the shared pool does not say what it has: %s", error.message)
            return
        self._known.add(key for key, is_there in zip(asked, found.are_there, strict=False) if is_there)

    # --- moving

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        if not blocks:
            return
        keys = [block.key for block in blocks]
        began_at = time.perf_counter()
        offerings, told = offer_slots(self._agent, memory, slots, _TRANSFER_S)
        self._writing.update(keys)
        try:
            keep = Keep(tuple(map(WireBlock.of, blocks)), tuple(checksums), told)
            kept = await self._link.ask(keep, Kept, _ANSWER_S)
        finally:
            self._writing.difference_update(keys)
            await withdraw(offerings)
        await self.look(keys, 0.0)  # it may not have had room for all
        self.stats.stored(kept.num_new, time.perf_counter() - began_at)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        """The pool brings its own from further down first, where it has to."""
        if not blocks:
            return []
        keys = [block.key for block in blocks]
        began_at = time.perf_counter()
        brought = Brought((), ())
        try:
            await self._thread.run(memory.reach, int(slots.max()) + 1)
            brought = await self._link.ask(Bring(tuple(map(WireBlock.of, blocks))), Brought, _ANSWER_S)
            came = await read_brought(self._agent, self._thread, brought, memory, slots, keys, _TRANSFER_S)
        except asyncio.CancelledError:
            self._decline(brought)
            if time.perf_counter() - began_at > _PATIENCE_S:  # that is why
                self._link.give_up("it was too slow")
            raise
        except KvoltError as error:
            self._decline(brought)
            log.warning("blocks did not come from the shared pool: %s", error.message)
            self.stats.failures["unread"] += len(keys)
            self.forget(keys)
            return [None] * len(keys)
        told = zip(keys, came, brought.checksums, strict=False)
        await self._tell_bad([key for key, each, _ in told if each is None])
        self.stats.loaded(sum(each is not None for each in came), time.perf_counter() - began_at)
        self.stats.failures["gone"] += max(len(keys) - len(brought.checksums), 0)
        self.forget([key for key, each in zip(keys, came, strict=True) if each is None])
        return came

    def _decline(self, answer: Answer) -> None:
        """What was brought for us and is not wanted any more."""
        if isinstance(answer, Brought):
            for each in answer.offered:
                self._agent.decline(each.ticket)

    async def _tell_bad(self, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        self.stats.failures["corrupt"] += len(keys)
        log.error("%d blocks of the shared pool are not what was written there", len(keys))
        try:
            await self._link.ask(Suspect(tuple(keys)), Done, _LOOK_S)
        except KvoltError as error:
            log.debug("the shared pool was not told: %s", error.message)

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """That they are there; they stay, since others use them."""
        self._known.forget(keys)
        return 0

    def take_changes(self) -> tuple[Change, ...]:
        return ()

    def check_integrity(self) -> None:
        """The pool has the books."""
