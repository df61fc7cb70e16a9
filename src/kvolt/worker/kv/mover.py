"""KvMover: port for KV transfers between workers.

`AgentMover` implements it over the transfer agent; simulations have one of their own, since their blocks have no bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Annotated, Protocol

import msgspec

from kvolt.core.errors import MALFORMED, KvoltError, ProtocolError
from kvolt.core.ids import BlockKey, RequestId
from kvolt.engines.contract import KvAddressable, KvAllocation, Prefill
from kvolt.runtime.tasks import TaskGroup
from kvolt.transfer.agent import OfferHandle, Operation, TransferAgent
from kvolt.transfer.memory.layout import SlabLayout, sources_for
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.reads.wire import bind_ticket, decode_ticket

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

    def offer(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float, reader_key: bytes = b""
    ) -> KvOffer:
        """Offer blocks to the holder of the ticket, once. They must not change until the offer is done.

        `reader_key`: the reader also needs the proof of this key for its identity (`core.request.reader_proof`).
        """
        ...

    async def pull(
        self,
        ticket: bytes,
        first: int,
        keys: Sequence[BlockKey],
        into: Sequence[int],
        timeout_s: float,
        proof: bytes = b"",
    ) -> str:
        """Read the blocks of a ticket, from `first` on, into local blocks. Returns the transfer path.

        KvoltError if any block is missing. Nothing is written after it returns, raises or is cancelled.
        """
        ...

    def decline(self, ticket: bytes, proof: bytes = b"") -> None:
        """Release the offered blocks without reading them."""
        ...

    @property
    def address(self) -> str:
        """Address of the local mailboxes."""
        ...

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> KvMessage:
        """Post a message for one reader, which may ask before or after."""
        ...

    async def receive(self, address: str, mailbox: int, timeout_s: float) -> bytes:
        """Wait for the message in a peer's mailbox. KvoltError if none is posted in time."""
        ...


class KvMessage(Protocol):
    """A posted message that waits for its reader."""

    def cancel(self) -> None: ...

    def wait_done(self) -> Awaitable[object]:
        """Wait until the message was read, has expired or was cancelled. Errors are logged, not raised."""
        ...


class KvOffer(Protocol):
    """Offered blocks."""

    @property
    def ticket(self) -> bytes: ...

    def cancel(self) -> None:
        """Refuse new reads."""
        ...

    def wait_done(self) -> Awaitable[object]:
        """Wait until the blocks may change: read, declined, expired or cancelled. Errors are logged, not raised."""
        ...


class AgentMover:
    """KvMover over a process's transfer agent, with one slab per TP rank.

    A ticket contains one agent ticket per rank. The reader reads the heads that its own ranks need: from two ranks into
    one slab concurrently; from one rank into two slabs sequentially, since the last read ends the offer.
    """

    def __init__(self, agent: TransferAgent, slabs: Sequence[Slab]) -> None:
        """`slabs`: in rank order."""
        self._agent = agent
        self._slabs = tuple(slabs)

    @property
    def block_bytes(self) -> int:
        return sum(slab.block_bytes for slab in self._slabs)

    def offer(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float, reader_key: bytes = b""
    ) -> KvOffer:
        seeds = _seeds(keys)
        offers: list[OfferHandle] = []
        try:
            for slab in self._slabs:
                offers.append(self._agent.offer(slab, blocks, timeout_s, seeds, reader_key))
        except KvoltError:
            for offer in offers:
                offer.cancel()
            raise
        return _RankOffers(offers)

    async def pull(
        self,
        ticket: bytes,
        first: int,
        keys: Sequence[BlockKey],
        into: Sequence[int],
        timeout_s: float,
        proof: bytes = b"",
    ) -> str:
        now = asyncio.get_running_loop().time
        ends_at = now() + timeout_s
        positions = range(first, first + len(into))
        seeds = _seeds([keys[each] for each in positions])
        tickets = _read_tickets(ticket, proof)
        slabs_by_ticket = _slabs_by_ticket(tickets, self._slabs)
        paths: set[str] = set()
        for turn in range(max(map(len, slabs_by_ticket.values()))):
            reads: list[Operation] = []
            try:
                for source, slabs in slabs_by_ticket.items():
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
                    await read.wait_done()
        for replica in tickets:
            if replica not in slabs_by_ticket:
                self._agent.decline(replica)
        return "+".join(sorted(paths))

    def decline(self, ticket: bytes, proof: bytes = b"") -> None:
        with contextlib.suppress(ProtocolError):  # an invalid ticket has no peer to notify
            for each in _read_tickets(ticket, proof):
                self._agent.decline(each)

    @property
    def address(self) -> str:
        return self._agent.address_text

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> KvMessage:
        return self._agent.post(mailbox, message, timeout_s)

    async def receive(self, address: str, mailbox: int, timeout_s: float) -> bytes:
        return await self._agent.receive(address, mailbox, timeout_s)


class _RankOffers:
    """Offers of the same blocks on all ranks; done when every one of them is."""

    def __init__(self, offers: Sequence[OfferHandle]) -> None:
        self._offers = offers
        self.ticket = _encode_tickets([offer.ticket for offer in offers])

    def cancel(self) -> None:
        for offer in self._offers:
            offer.cancel()

    async def wait_done(self) -> None:
        for offer in self._offers:
            await offer.wait_done()


def _read_tickets(data: bytes, proof: bytes) -> tuple[bytes, ...]:
    """Agent tickets per rank, with the proof of this reader. ProtocolError if malformed."""
    try:
        tickets: tuple[bytes, ...] = _decode_tickets(data)
    except MALFORMED as error:
        raise ProtocolError(f"malformed ticket: {error}", rule="ticket") from None
    return tuple(bind_ticket(ticket, proof) for ticket in tickets)


def _slabs_by_ticket(tickets: Sequence[bytes], ours: Sequence[Slab]) -> dict[bytes, list[Slab]]:
    """Local slabs that read from each ticket; unneeded tickets are left out. Errors as of `sources_for`."""
    by_rank: dict[SlabLayout, bytes] = {}
    for ticket in tickets:
        layout = decode_ticket(ticket).slab.layout
        if layout is None:
            raise ProtocolError("the ticket is for memory that is not KV", rule="ticket")
        by_rank[layout] = ticket
    slabs_by_ticket: dict[bytes, list[Slab]] = {}
    for slab in ours:
        assert slab.layout is not None, "slabs of an engine have a layout"
        for source, _ in sources_for(slab.layout, list(by_rank)):
            slabs_by_ticket.setdefault(by_rank[source], []).append(slab)
    return slabs_by_ticket


def _seeds(keys: Sequence[BlockKey]) -> bytes:
    """Checksum seeds from block keys: the bytes of another block fail the check as well."""
    return b"".join(key[:_SEED_BYTES] for key in keys)


class SettlingEngine(KvAddressable, Prefill, Protocol):
    """Engine interface of the settling."""


class KvSettling:
    """Commits or rolls back imported blocks, even if the caller is cancelled. Used by handoffs and tiering."""

    def __init__(self, engine: SettlingEngine, task_group: TaskGroup) -> None:
        self._engine = engine
        self._task_group = task_group

    async def settle(self, allocation: KvAllocation, num_filled: int, keep_for: RequestId | None) -> None:
        """Commit the filled blocks and release the others. If the caller is cancelled nothing is kept."""
        kept = () if keep_for is None else (keep_for,)  # engine plugins may lack the parameter
        settling = self._task_group.start(self._engine.commit_kv(allocation, num_filled, *kept), "settle")
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            if keep_for is not None:
                self.release_kept(keep_for, settling)
            raise

    def release_kept(self, request_id: RequestId, after: asyncio.Task[None] | None = None) -> None:
        """Release blocks kept for a request that is not submitted, once the task `after` has ended."""
        if not self._task_group.closed:
            self._task_group.start(self._release_kept(request_id, after), "release")

    async def _release_kept(self, request_id: RequestId, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(KvoltError):  # a dead engine holds nothing
            await self._engine.release_prefill(request_id)
