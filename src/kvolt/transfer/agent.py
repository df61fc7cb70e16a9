"""TransferAgent: moves blocks between this process and others. The public face of `kvolt.transfer`.

    agent = TransferAgent()
    slab = Slab.shared(num_blocks=1024, block_bytes=65536)       # once; blocks are its numbers
    offer = agent.offer(slab, [3, 4, 5], timeout_s=30)           # here: these may be read ...
    read = agent.read(offer.ticket, slab, [7, 8, 9], timeout_s=30)   # ... there, by who has the ticket
    await read                                                   # they are here, with the checksums they left with
    await offer                                                  # and may change again there

The other way round `accept` gives a ticket for blocks that a peer may fill, by `write`; in any order and in parts. All
four are operations: awaited, cancelled, with a deadline; one that is over moves no byte any more.

Two that know of each other only a number and an address meet in a room, whoever comes first:

    agent.post(room, note, timeout_s=30)                         # here; ...
    note = await agent.meet(where, room, timeout_s=30)           # ... there, with what `agent.where` is here
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvolt.core.errors import Cancelled, InvalidRequest, KvoltError, Overloaded, PayloadTooLarge
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.address import read_where, where_of
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.paths.capabilities import MachineFacts, capabilities_of
from kvolt.transfer.paths.machine import look
from kvolt.transfer.paths.path_watch import PathOptions, PathWatch
from kvolt.transfer.peer.hub import Hub, Writable
from kvolt.transfer.peer.mailbox import LAST_ROOM, Guest, Posted
from kvolt.transfer.peer.offers import Offered
from kvolt.transfer.peer.read_op import Reading
from kvolt.transfer.peer.read_request import ALL, Wanted, new_wanted
from kvolt.transfer.peer.wire import (
    MAX_BLOCKS,
    MAX_NOTE_BYTES,
    Address,
    Offer,
    Ticket,
    read_ticket,
    ticket_bytes,
)
from kvolt.transfer.transfer_handle import Meeting, Posting, Undertaking

Blocks = Sequence[int] | Numbers


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an agent is reached, and how."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    """The address that peers are told; None for `host`."""
    shared_memory: bool = True
    """Off, peers of the same host use TCP, too."""
    nixl: bool = False
    """Read over NIXL from peers that have it on, too, wherever it does not have to emulate. It must be installed."""
    self_test: bool = False
    """Measure the paths to a peer when something was first read from it, and let peers measure those from here."""


class Operation(Undertaking[str]):
    """One transfer, or one offer. Its path at the end."""

    def __init__(self, name: str, num_bytes: int, cancel: Callable[[], object]) -> None:
        super().__init__(name, cancel)
        self.num_bytes = num_bytes
        self.path = ""
        """How its bytes went, once that is known."""

    def _outcome(self) -> str:
        return self.path


class Offering(Operation):
    """An operation that waits for a peer, who is given the ticket."""

    def __init__(self, ticket: Ticket, num_bytes: int, cancel: Callable[[], object]) -> None:
        super().__init__(f"{ticket.is_for} {ticket.secret:016x}", num_bytes, cancel)
        self.ticket = ticket_bytes(ticket)


class TransferAgent:
    """See the module. Its calls may come from any thread, and never wait."""

    def __init__(
        self,
        options: TransferOptions | None = None,
        clock: Clock | None = None,
        facts: MachineFacts | None = None,
    ) -> None:
        """`facts`: what `machine.look` found; looked up without UCX's settings where it is None.

        ConfigError when it cannot be reached as asked.
        """
        options = options or TransferOptions()
        can = capabilities_of(facts or look({}), options.shared_memory, options.nixl)
        self._hub = Hub(
            options.host,
            options.port,
            options.advertise,
            options.shared_memory,
            clock or SystemClock(),
            options.nixl,
            PathOptions(can=can, self_test=options.self_test),
        )
        self._hub.progress.start()
        self._hub.progress.call(self._hub.start)

    @property
    def address(self) -> Address:
        return self._hub.address

    @property
    def where(self) -> str:
        """The address as text: what `meet` takes."""
        return where_of(self._hub.address)

    @property
    def paths(self) -> PathWatch:
        """How fast blocks come from where, and where they come slowly."""
        return self._hub.paths

    @property
    def unfinished(self) -> ByteBudget:
        """Of messages that peers have not finished."""
        return self._hub.unfinished

    @property
    def num_refused(self) -> int:
        """Connections over the limits."""
        return self._hub.num_refused

    def close(self) -> None:
        """All that is under way is cancelled. Waits for it."""
        self._hub.progress.close(self._hub.close)

    # --- to be read

    def offer(self, slab: Slab, blocks: Blocks, timeout_s: float, seeds: bytes | None = None) -> Offering:
        """These blocks may be read once by who has the ticket; they must not change until that is over.

        `seeds`: eight bytes a block, which go into its checksum: who reads with others will not have it.
        """
        numbers, deadline = _some(slab, blocks, seeds), self._hub.deadline_in(timeout_s)
        hub, ticket = self._hub, self._ticket(slab, numbers, "read")
        offering = Offering(
            ticket,
            len(numbers) * slab.block_bytes,
            lambda: hub.progress.call(lambda: hub.offers.take_back(ticket.secret)),
        )
        self._do(
            offering,
            lambda: hub.offer(ticket.secret, Offered(slab, numbers, deadline, offering.end, seeds)),
        )
        return offering

    def read(
        self,
        ticket: bytes,
        slab: Slab,
        blocks: Blocks,
        timeout_s: float,
        *,
        positions: Blocks | None = None,
        seeds: bytes | None = None,
        is_checked: bool = True,
        is_last: bool = True,
    ) -> Operation:
        """Blocks of a ticket, those at `positions` or all, into these of ours, one each.

        `is_last`: with this the offer is over. Who shares the heads of its blocks among several slabs reads the ticket
        once for each of them, one after the other.
        """
        source = _ticket(ticket, "read")
        wanted = new_wanted(
            source,
            slab,
            slab.numbers(blocks),
            ALL if positions is None else np.ascontiguousarray(positions, dtype=np.int64),
            seeds,
            is_checked,
        )
        return self._read(wanted, timeout_s, is_last)

    def _read(self, wanted: Wanted, timeout_s: float, is_last: bool) -> Operation:
        hub, deadline = self._hub, self._hub.deadline_in(timeout_s)

        def over(error: KvoltError | None) -> None:
            operation.path = reading.path
            operation.end(error)

        reading = Reading(wanted, over, is_last)
        operation = Operation(
            f"read {wanted.ticket.secret:016x}",
            wanted.num_bytes,
            lambda: hub.progress.call(lambda: reading.stop(Cancelled("the read was cancelled"))),
        )
        self._do(operation, lambda: hub.read(reading, deadline))
        return operation

    def decline(self, ticket: bytes) -> None:
        """Nobody will read these blocks: their owner need not wait. Told as well as can be, and not answered."""
        source, hub = _ticket(ticket, "read"), self._hub

        def decline() -> None:
            if source.address == hub.address:
                hub.offers.take_back(source.secret)
            elif not hub.is_closed:
                with contextlib.suppress(Overloaded):
                    hub.link_to(source.address).decline(source.secret)

        hub.progress.call(decline)

    # --- to be written to

    def accept(self, slab: Slab, blocks: Blocks, timeout_s: float, seeds: bytes | None = None) -> Offering:
        """A peer may fill these blocks, each once, until all of them are or the time is over."""
        numbers, deadline = _some(slab, blocks, seeds), self._hub.deadline_in(timeout_s)
        hub, ticket = self._hub, self._ticket(slab, numbers, "write")
        offering = Offering(
            ticket,
            len(numbers) * slab.block_bytes,
            lambda: hub.progress.call(lambda: hub.withdraw_writable(ticket.secret)),
        )
        writable = Writable(
            slab,
            numbers,
            seeds,
            deadline,
            offering.end,
            np.zeros(len(numbers), dtype=bool),
            len(numbers),
        )
        self._do(offering, lambda: hub.let_write(ticket.secret, writable))
        return offering

    def write(
        self,
        ticket: bytes,
        slab: Slab,
        blocks: Blocks,
        timeout_s: float,
        *,
        positions: Blocks | None = None,
        seeds: bytes | None = None,
        is_checked: bool = True,
    ) -> Operation:
        """Blocks of ours into those of a ticket, at `positions` or all. Over when the peer has them."""
        target = _ticket(ticket, "write")
        numbers, deadline = _some(slab, blocks, seeds), self._hub.deadline_in(timeout_s)
        num_places = target.num_blocks if positions is None else len(positions)
        if num_places != len(numbers):
            raise InvalidRequest(f"{len(numbers)} blocks for {num_places} of the peer", param="blocks")
        packed = np.asarray(range(num_places) if positions is None else positions, dtype="<i8").tobytes()
        hub, source = self._hub, self._ticket(slab, numbers, "read")
        operation = Operation(
            f"write {target.secret:016x}",
            len(numbers) * slab.block_bytes,
            lambda: hub.progress.call(lambda: hub.offers.take_back(source.secret)),
        )

        def taken(error: KvoltError | None) -> None:
            """By the peer's word; that it has read is told by its Ended."""
            if error is not None:
                told.append(error)
                hub.offers.take_back(source.secret)

        def over(error: KvoltError | None) -> None:
            if not operation.state.is_over:
                operation.end(told[0] if told and error is not None else error)

        told: list[KvoltError] = []

        def begin() -> None:
            is_own = target.address == hub.address
            link = None if is_own else hub.link_to(target.address)
            hub.offer(source.secret, Offered(slab, numbers, deadline, over, seeds))
            if link is None:
                hub.take_offer(Offer(0, target.secret, packed, source, is_checked), taken)
            else:
                link.offer(lambda op: Offer(op, target.secret, packed, source, is_checked), taken)

        self._do(operation, begin)
        return operation

    # --- rooms

    def post(self, room: int, note: bytes, timeout_s: float) -> Posting:
        """Who comes to this agent with the room's number may have the note, once. The number is the secret: 63 random
        bits.

        Over when the note was sent, taken back or late. InvalidRequest, by awaiting it, for a room that is taken.
        """
        _check_room(room)
        if len(note) > MAX_NOTE_BYTES:
            raise PayloadTooLarge(
                f"a note of {len(note)} bytes: {MAX_NOTE_BYTES} at most",
                limit_bytes=MAX_NOTE_BYTES,
                size_bytes=len(note),
            )
        hub = self._hub
        posting = Posting(f"post {room:016x}", lambda: hub.progress.call(lambda: hub.rooms.take_back(posted)))
        posted = Posted(room, bytes(note), hub.deadline_in(timeout_s), posting.end)
        self._do(posting, lambda: hub.rooms.post(posted))
        return posting

    def meet(self, address: str, room: int, timeout_s: float) -> Meeting:
        """The note of a room of the agent at this address (its `where`), when it is posted."""
        _check_room(room)
        to, hub = read_where(address), self._hub

        def met(note: bytes) -> bool:
            meeting.note = note
            meeting.end(None)
            return True

        def stop() -> None:
            if not meeting.state.is_over:  # also where it could not begin
                guest.fail(Cancelled("the meeting was cancelled"))

        meeting = Meeting(f"meet {room:016x}", lambda: hub.progress.call(stop))
        guest = Guest(room, hub.deadline_in(timeout_s), met, meeting.end)
        self._do(meeting, lambda: hub.meet(to, guest))
        return meeting

    # ---

    def _ticket(self, slab: Slab, numbers: Numbers, is_for: Any) -> Ticket:
        number = self._hub.number_of(slab)
        return Ticket(self._hub.address, secrets.randbits(64), slab.info(number), len(numbers), is_for)

    def _do(self, operation: Undertaking[Any], begin: Callable[[], object]) -> None:
        """In the progress thread; what cannot begin is over."""

        def run() -> None:
            operation.begin()
            if self._hub.is_closed:
                operation.end(Cancelled("the agent is closed"))
                return
            try:
                begin()
            except KvoltError as error:
                operation.end(error)

        if not self._hub.progress.call(run):
            run()


def _ticket(data: bytes, is_for: str) -> Ticket:
    ticket = read_ticket(data)
    if ticket.is_for != is_for:
        raise InvalidRequest(f"a ticket to {ticket.is_for} is none to {is_for}", param="ticket")
    return ticket


def _check_room(room: int) -> None:
    if not 0 <= room <= LAST_ROOM:
        raise InvalidRequest("the number of a room has 63 bits", param="room")


def _some(slab: Slab, blocks: Blocks, seeds: bytes | None) -> Numbers:
    numbers = slab.numbers(blocks)
    if not len(numbers):
        raise InvalidRequest("no blocks are nothing to move", param="blocks")
    if len(numbers) > MAX_BLOCKS:
        raise InvalidRequest(f"{MAX_BLOCKS} blocks at a time at most: move them in parts", param="blocks")
    if not slab.are_apart(numbers):
        raise InvalidRequest("a block is named twice", param="blocks")
    if seeds is not None and len(seeds) != 8 * len(numbers):
        raise InvalidRequest("a seed has eight bytes, and every block has one", param="seeds")
    return numbers
