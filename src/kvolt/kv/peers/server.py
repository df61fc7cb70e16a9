"""PeerServer: serves blocks of a worker's tiers to other workers.

Completed device blocks are offloaded to host memory, so this covers almost all blocks of a worker. Blocks that are not
in host memory are loaded from the worker's own lower tiers first, never from a third worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvolt.core.errors import InvalidRequest, Overloaded, Unavailable
from kvolt.kv.shared_pool.slot_reads import offer_slots, withdraw_offers
from kvolt.kv.shared_pool.wire import MAX_BLOCKS, FetchBlocks, FetchResult
from kvolt.kv.tiers.host_tier import HostTier, int64_array
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.agent import OfferHandle, TransferAgent

_TRANSFER_S = 15.0
_MAX_OPEN = 16
"""Concurrent fetches."""
_MAX_HELD_SHARE = 0.5
"""Share of the host's slots that fetches may hold, since those cannot be evicted."""


class PeerServer:
    """See the module."""

    def __init__(self, host: HostTier, agent: TransferAgent) -> None:
        self._host = host
        self._agent = agent
        self._num_open = 0
        self._num_held = 0
        self._is_closed = False
        self.num_served = 0
        """Blocks offered to other workers."""

    async def serve(self, request: FetchBlocks, reader: str = "") -> AsyncIterator[FetchResult]:
        """Yield one result. Its blocks can be read until they have been read or the generator is closed.

        `reader`: identity of the worker that asks, which alone can read them; empty without a cluster key.
        """
        if self._is_closed:
            raise Unavailable("this worker is stopping and serves no more blocks", reason="stopping")
        if request.shape is not None and request.shape != self._host.shape:
            local, remote = self._host.shape, request.shape
            raise InvalidRequest(
                f"blocks have {local.block_bytes:,} bytes from {local.num_ranks} ranks here, not "
                f"{remote.block_bytes:,} from {remote.num_ranks}",
                param="shape",
            )
        blocks = request.blocks[:MAX_BLOCKS]
        room = int(self._host.slot_table.num_slots * _MAX_HELD_SHARE) - self._num_held
        num_local = min(self._host.num_local([block.key for block in blocks]), max(room, 0))
        if self._num_open >= _MAX_OPEN or (not num_local and room <= 0):
            raise Overloaded("too many concurrent fetches from this worker")
        self._num_open += 1
        self._num_held += num_local
        try:
            async with self._offered(blocks[:num_local], reader) as (result, offers):
                yield result
                for offer in offers:
                    await offer.wait_done()
        finally:
            self._num_open -= 1
            self._num_held -= num_local

    @asynccontextmanager
    async def _offered(
        self, blocks: Sequence[TierBlock], reader: str
    ) -> AsyncIterator[tuple[FetchResult, Sequence[OfferHandle]]]:
        onboarded = await self._host.onboard(blocks)
        try:
            slots = int64_array(map(self._host.slot_table.slot, onboarded.keys))
            checksums = tuple(map(self._host.slot_table.checksum, onboarded.keys))
            offers, offered = offer_slots(self._agent, self._host.memory, slots, _TRANSFER_S, reader)
            self.num_served += len(onboarded.keys)
            try:
                yield FetchResult(checksums, offered), offers
            finally:
                await withdraw_offers(offers)
        finally:
            self._host.release(onboarded.keys)

    def close(self) -> None:
        """Reject new fetches."""
        self._is_closed = True
