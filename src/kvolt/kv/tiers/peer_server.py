"""PeerGiving: what a worker's tiers have, for other workers that name the blocks.

A device's blocks go down to the host's memory once they are complete, so that this is nearly all a worker has. What the
host does not have comes up from its own disk or store first; never from a third worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvolt.core.errors import InvalidRequest, Overloaded, Unavailable
from kvolt.kv.shared_pool.slot_reads import offer_slots, withdraw
from kvolt.kv.shared_pool.wire import MOST_BLOCKS, Bring, Brought
from kvolt.kv.tiers.host_tier import HostTier, numbers_of
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.agent import Offering, TransferAgent

_TRANSFER_S = 15.0
_MOST_OPEN = 16
"""Workers, or batches of theirs, at a time."""
_MOST_HELD = 0.5
"""Of the host's slots, those that others may hold: they cannot go meanwhile."""


class PeerGiving:
    """See the module."""

    def __init__(self, host: HostTier, agent: TransferAgent) -> None:
        self._host = host
        self._agent = agent
        self._num_open = 0
        self._num_held = 0
        self._is_closed = False
        self.num_given = 0
        """Blocks that were offered."""

    async def give(self, bring: Bring) -> AsyncIterator[Brought]:
        """One answer. Its blocks may be read until they have been, or until this is closed."""
        if self._is_closed:
            raise Unavailable("this worker gives nothing any more", reason="stopping")
        if bring.shape is not None and bring.shape != self._host.shape:
            ours, theirs = self._host.shape, bring.shape
            raise InvalidRequest(
                f"blocks here have {ours.block_bytes:,} bytes of {ours.num_ranks} ranks, not {theirs.block_bytes:,} of "
                f"{theirs.num_ranks}",
                param="shape",
            )
        blocks = [each.block() for each in bring.blocks[:MOST_BLOCKS]]
        room = int(self._host.books.num_slots * _MOST_HELD) - self._num_held
        num_own = min(self._host.num_own([block.key for block in blocks]), max(room, 0))
        if self._num_open >= _MOST_OPEN or (not num_own and room <= 0):
            raise Overloaded("too many workers are fetching blocks here")
        self._num_open += 1
        self._num_held += num_own
        try:
            async with self._offered(blocks[:num_own]) as (brought, offerings):
                yield brought
                for offering in offerings:
                    await offering.over()
        finally:
            self._num_open -= 1
            self._num_held -= num_own

    @asynccontextmanager
    async def _offered(
        self, blocks: Sequence[TierBlock]
    ) -> AsyncIterator[tuple[Brought, Sequence[Offering]]]:
        brought = await self._host.bring(blocks)
        try:
            slots = numbers_of(map(self._host.books.slot, brought.keys))
            checksums = tuple(map(self._host.books.checksum, brought.keys))
            offerings, told = offer_slots(self._agent, self._host.memory, slots, _TRANSFER_S)
            self.num_given += len(brought.keys)
            try:
                yield Brought(checksums, told), offerings
            finally:
                await withdraw(offerings)
        finally:
            self._host.release(brought.keys)

    def close(self) -> None:
        """Nobody is given anything new."""
        self._is_closed = True
