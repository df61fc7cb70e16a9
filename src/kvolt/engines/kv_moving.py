"""KvMover: how the blocks of a handoff get from one worker's memory into another's.

A port: real workers have a transfer agent (`AgentMover`); on virtual time, where blocks have no bytes, the twin has one
of its own. Knows no request and no engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from kvolt.core.ids import BlockKey
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory import Slab

_SEED_BYTES = 8


class KvMover(Protocol):
    """See the module."""

    @property
    def block_bytes(self) -> int: ...

    def offer(self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float) -> KvOffer:
        """These blocks of ours may be pulled, once, by who has the ticket. They stay as they are meanwhile."""
        ...

    async def pull(
        self, ticket: bytes, first: int, keys: Sequence[BlockKey], into: Sequence[int], timeout_s: float
    ) -> str:
        """The blocks of a ticket from the `first` on into these of ours; the path that they took.

        KvoltError where they did not come whole. Cancelled or not: when it is over nothing is written any more.
        """
        ...

    def decline(self, ticket: bytes) -> None:
        """Nobody wants these blocks."""
        ...


class KvOffer(Protocol):
    """Blocks that wait to be pulled."""

    @property
    def ticket(self) -> bytes: ...

    def cancel(self) -> None:
        """Nobody may begin to pull any more."""
        ...

    def over(self) -> Awaitable[object]:
        """They may change again: pulled, declined, expired or cancelled. Errors are told, and none to be handled."""
        ...


class AgentMover:
    """A KvMover over a process's transfer agent, for the blocks of one slab."""

    def __init__(self, agent: TransferAgent, slab: Slab) -> None:
        self._agent = agent
        self._slab = slab

    @property
    def block_bytes(self) -> int:
        return self._slab.block_bytes

    def offer(self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float) -> KvOffer:
        return self._agent.offer(self._slab, blocks, timeout_s, seeds=_seeds(keys))

    async def pull(
        self, ticket: bytes, first: int, keys: Sequence[BlockKey], into: Sequence[int], timeout_s: float
    ) -> str:
        positions = range(first, first + len(into))
        read = self._agent.read(
            ticket,
            self._slab,
            into,
            timeout_s,
            positions=list(positions),
            seeds=_seeds([keys[each] for each in positions]),
        )
        try:
            return await read
        finally:
            read.cancel()
            await read.over()

    def decline(self, ticket: bytes) -> None:
        self._agent.decline(ticket)


def _seeds(keys: Sequence[BlockKey]) -> bytes:
    """Of checksums: bytes that are under another name than they left with are as wrong as a flipped bit."""
    return b"".join(key[:_SEED_BYTES] for key in keys)
