"""PeerGiving: what a worker's tiers have, for other workers that name the blocks.

A device's blocks go down to the host's memory once they are complete, so that this is nearly all a worker has. What the
host does not have comes up from its own disk or store first; never from a third worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from kvolt.core.errors import Overloaded
from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.host_tier import HostTier, numbers_of
from kvolt.kv.tiers.pool_wire import MOST_BLOCKS, Bring, Brought
from kvolt.kv.tiers.slot_reads import offer_slots, withdraw
from kvolt.transfer.agent import TransferAgent

_TRANSFER_S = 15.0
_MOST_OPEN = 16
"""Workers, or batches of theirs, at a time: their blocks cannot go meanwhile."""


class PeerGiving:
    """See the module."""

    def __init__(self, host: HostTier, agent: TransferAgent) -> None:
        self._host = host
        self._agent = agent
        self._num_open = 0
        self.num_given = 0
        """Blocks that were offered."""

    async def give(self, bring: Bring) -> AsyncIterator[Brought]:
        """One answer. Its blocks may be read until they have been, or until this is closed."""
        if self._num_open >= _MOST_OPEN:
            raise Overloaded("too many workers are fetching blocks here")
        self._num_open += 1
        try:
            blocks = [each.block() for each in bring.blocks[:MOST_BLOCKS]]
            tiers = self._host.tiers_of([block.key for block in blocks])
            num_own = tiers.index(Tier.PEER) if Tier.PEER in tiers else len(tiers)
            brought = await self._host.bring(blocks[:num_own])
            try:
                slots = numbers_of(map(self._host.books.slot, brought.keys))
                checksums = tuple(map(self._host.books.checksum, brought.keys))
                offerings, told = offer_slots(self._agent, self._host.memory, slots, _TRANSFER_S)
                self.num_given += len(brought.keys)
                try:
                    yield Brought(checksums, told)
                    for offering in offerings:
                        await offering.over()
                finally:
                    await withdraw(offerings)
            finally:
                self._host.release(brought.keys)
        finally:
            self._num_open -= 1
