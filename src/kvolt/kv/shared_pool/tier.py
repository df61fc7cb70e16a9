"""PoolTier: the shared pool of a host (`PoolServer`) as a lower tier of a worker.

While the pool is unreachable the tier is empty.
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
from kvolt.kv.shared_pool import wire
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.slot_reads import offer_slots, read_verified, withdraw_offers
from kvolt.kv.tiers.lower_tier import SharedTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Numbers
from kvolt.transfer.peer.handshakes import TlsContexts

log = logging.getLogger(__name__)

_TRANSFER_S = 30.0
_RESPONSE_S = 35.0
_LOOKUP_S = 0.5
_SLOW_READ_S = 2.0
"""A read cancelled after this time was too slow; one cancelled earlier was not needed any more."""


class PoolTier(SharedTier):
    """See the module."""

    tier = Tier.PEER
    lookup_s = 0.002

    def __init__(
        self,
        path: Path,
        shape: BlockShape,
        now: Callable[[], float],
        credentials: TlsContexts | None = None,
    ) -> None:
        """`credentials`: for transfers over TCP, used where shared memory is unavailable."""
        super().__init__()
        self._link = PoolLink(path, shape, now)
        self._agent = TransferAgent(credentials=credentials)
        self._thread = TierThread("kv-pool")
        self._link.on_lost = self._known.forget
        self._link.on_late = self._decline

    @property
    def pool(self) -> InstanceId | None:
        """Instance id under which the connected pool publishes its blocks; None if it does not."""
        return self._link.pool

    def set_on_pool(self, callback: Callable[[], None]) -> None:
        """Set the callback for changes of `pool`."""
        self._link.on_pool = callback

    async def start(self) -> None:
        """ConfigError if the pool has another block shape. An unreachable pool is retried in the background."""
        try:
            async with asyncio.timeout(_RESPONSE_S):
                await self._link.connect()
        except (NetworkFault, TimeoutError) as error:
            log.warning("shared pool unreachable, retrying: error=%s", error)
        self._link.keep_connected()

    async def close(self) -> None:
        await self._link.close()
        await asyncio.to_thread(self._agent.close)
        await self._thread.close()

    async def lookup(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        start = self._known.num_known(keys)
        unknown = keys[start : start + wire.MAX_BLOCKS]
        if not unknown:
            return
        try:
            result = await self._link.request(
                wire.Lookup(tuple(unknown), worth_s), wire.LookupResult, _LOOKUP_S
            )
        except KvoltError as error:
            log.debug("shared pool lookup failed: error=%s", error.message)
            return
        self._known.add(key for key, exists in zip(unknown, result.exist, strict=False) if exists)

    # --- reading and writing

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        if not blocks:
            return
        keys = [block.key for block in blocks]
        started_at = time.perf_counter()
        offers, offered = offer_slots(self._agent, memory, slots, _TRANSFER_S)
        self._writing.update(keys)
        try:
            request = wire.StoreBlocks(tuple(blocks), tuple(checksums), offered)
            stored = await self._link.request(request, wire.StoreResult, _RESPONSE_S)
        finally:
            self._writing.difference_update(keys)
            await withdraw_offers(offers)
        await self.lookup(keys, 0.0)  # the pool may have stored only some
        self.stats.record_stored(stored.num_new, time.perf_counter() - started_at)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        """Read blocks, which the pool first loads from its lower tiers if necessary."""
        if not blocks:
            return []
        keys = [block.key for block in blocks]
        started_at = time.perf_counter()
        result = wire.FetchResult((), ())
        try:
            await self._thread.run(memory.grow_to, int(slots.max()) + 1)
            result = await self._link.request(wire.FetchBlocks(tuple(blocks)), wire.FetchResult, _RESPONSE_S)
            received = await read_verified(
                self._agent, self._thread, result, memory, slots, keys, _TRANSFER_S
            )
        except asyncio.CancelledError:
            self._decline(result)
            if time.perf_counter() - started_at > _SLOW_READ_S:  # cancelled because of the delay
                self._link.disconnect("read too slow")
            raise
        except KvoltError as error:
            self._decline(result)
            log.warning("read from shared pool failed: error=%s", error.message)
            self.stats.failures["unread"] += len(keys)
            self.forget(keys)
            return [None] * len(keys)
        results = zip(keys, received, result.checksums, strict=False)
        await self._report_corrupt([key for key, each, _ in results if each is None])
        self.stats.record_loaded(sum(each is not None for each in received), time.perf_counter() - started_at)
        self.stats.failures["gone"] += max(len(keys) - len(result.checksums), 0)
        self.forget([key for key, each in zip(keys, received, strict=True) if each is None])
        return received

    def _decline(self, response: wire.PoolResponse) -> None:
        """Decline the offers of a fetch result that is not needed any more."""
        if isinstance(response, wire.FetchResult):
            for each in response.offered:
                self._agent.decline(each.ticket)

    async def _report_corrupt(self, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        self.stats.failures["corrupt"] += len(keys)
        log.error("corrupt blocks from shared pool: blocks=%d", len(keys))
        try:
            await self._link.request(wire.VerifyBlocks(tuple(keys)), wire.Done, _LOOKUP_S)
        except KvoltError as error:
            log.debug("corrupt blocks not reported: error=%s", error.message)
