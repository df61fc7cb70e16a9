"""KvMover: how the blocks of a handoff get from one worker's memory into another's.

A port: real workers have a transfer agent (`AgentMover`); on virtual time, where blocks have no bytes, the twin has one
of its own. Knows no request and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Annotated, Protocol

import msgspec

from kvolt.core.errors import KvoltError, ProtocolError
from kvolt.core.ids import BlockKey
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.transfer.agent import Offering, Operation, TransferAgent
from kvolt.transfer.memory.layout import SlabLayout, sources_for
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.peer.wire import read_ticket

_SEED_BYTES = 8
_MAX_RANKS = 1024

_encode_tickets = msgspec.msgpack.Encoder().encode
_decode_tickets = msgspec.msgpack.Decoder(
    Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=_MAX_RANKS)]
).decode


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

    @property
    def where(self) -> str:
        """Where others meet us."""
        ...

    def post(self, room: int, note: bytes, timeout_s: float) -> KvPost:
        """For who asks for it by that number, once, before or after."""
        ...

    async def meet(self, where: str, room: int, timeout_s: float) -> bytes:
        """What a peer posts under that number, once it has. KvoltError where that does not come."""
        ...


class KvPost(Protocol):
    """A note that waits to be asked for."""

    def cancel(self) -> None: ...

    def over(self) -> Awaitable[object]:
        """Nobody can ask for it any more, or somebody has. Errors are told, and none to be handled."""
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
    """A KvMover over a process's transfer agent, for blocks whose heads are shared by the slabs of one rank or several.

    Its ticket has one of the agent's for each rank. Who pulls reads from each the heads that its own ranks need: from
    two ranks into one slab at once, from one into two slabs one after the other: with the last read an offer is over.
    """

    def __init__(self, agent: TransferAgent, slabs: Sequence[Slab]) -> None:
        """`slabs`: in order of ranks."""
        self._agent = agent
        self._slabs = tuple(slabs)

    @property
    def block_bytes(self) -> int:
        return sum(slab.block_bytes for slab in self._slabs)

    def offer(self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float) -> KvOffer:
        seeds = _seeds(keys)
        offers: list[Offering] = []
        try:
            for slab in self._slabs:
                offers.append(self._agent.offer(slab, blocks, timeout_s, seeds=seeds))
        except KvoltError:
            for offer in offers:
                offer.cancel()
            raise
        return _RankOffers(offers)

    async def pull(
        self, ticket: bytes, first: int, keys: Sequence[BlockKey], into: Sequence[int], timeout_s: float
    ) -> str:
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        positions = range(first, first + len(into))
        seeds = _seeds([keys[each] for each in positions])
        tickets = _read_tickets(ticket)
        slabs_of = _slabs_by_ticket(tickets, self._slabs)
        paths: set[str] = set()
        for turn in range(max(map(len, slabs_of.values()))):
            reads: list[Operation] = []
            try:
                for source, slabs in slabs_of.items():
                    if turn < len(slabs):
                        read = self._agent.read(
                            source,
                            slabs[turn],
                            into,
                            max(ends_at - now(), 0.0),
                            positions=list(positions),
                            seeds=seeds,
                            is_last=turn + 1 == len(slabs),
                        )
                        reads.append(read)
                paths.update([await read for read in reads])
            finally:
                for read in reads:
                    read.cancel()
                for read in reads:
                    await read.over()
        for replica in tickets:
            if replica not in slabs_of:
                self._agent.decline(replica)
        return "+".join(sorted(paths))

    def decline(self, ticket: bytes) -> None:
        with contextlib.suppress(ProtocolError):  # then there is nobody to be told
            for each in _read_tickets(ticket):
                self._agent.decline(each)

    @property
    def where(self) -> str:
        return self._agent.where

    def post(self, room: int, note: bytes, timeout_s: float) -> KvPost:
        return self._agent.post(room, note, timeout_s)

    async def meet(self, where: str, room: int, timeout_s: float) -> bytes:
        return await self._agent.meet(where, room, timeout_s)


class _RankOffers:
    """The same blocks in the slabs of all ranks: over when none of them is waited for any more."""

    def __init__(self, offers: Sequence[Offering]) -> None:
        self._offers = offers
        self.ticket = _encode_tickets([offer.ticket for offer in offers])

    def cancel(self) -> None:
        for offer in self._offers:
            offer.cancel()

    async def over(self) -> None:
        for offer in self._offers:
            await offer.over()


def _read_tickets(data: bytes) -> tuple[bytes, ...]:
    """Of the ranks. ProtocolError for what is none."""
    try:
        tickets: tuple[bytes, ...] = _decode_tickets(data)
    except MALFORMED as error:
        raise ProtocolError(f"tickets that cannot be read: {error}", rule="ticket") from None
    return tickets


def _slabs_by_ticket(tickets: Sequence[bytes], ours: Sequence[Slab]) -> dict[bytes, list[Slab]]:
    """Into which of our slabs heads of which rank of the peer's go; a rank that none needs is left out.

    Errors as of `sources_for`: no head of a block may be missing.
    """
    by_rank: dict[SlabLayout, bytes] = {}
    for ticket in tickets:
        layout = read_ticket(ticket).slab.layout
        if layout is None:
            raise ProtocolError("a ticket for blocks that are no KV", rule="ticket")
        by_rank[layout] = ticket
    found: dict[bytes, list[Slab]] = {}
    for slab in ours:
        assert slab.layout is not None, "the slabs of an engine say what lies in them"
        for source, _ in sources_for(slab.layout, list(by_rank)):
            found.setdefault(by_rank[source], []).append(slab)
    return found


def _seeds(keys: Sequence[BlockKey]) -> bytes:
    """Of checksums: bytes that are under another name than they left with are as wrong as a flipped bit."""
    return b"".join(key[:_SEED_BYTES] for key in keys)
