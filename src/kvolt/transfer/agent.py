"""TransferAgent: moves blocks between this process and others. The public face of `kvolt.transfer`.

    agent = TransferAgent()
    slab = Slab.shared(num_blocks=1024, block_bytes=65536)       # once; blocks are its numbers
    offer = agent.offer(slab, [3, 4, 5], timeout_s=30)           # here: these may be read ...
    read = agent.read(offer.ticket, slab, [7, 8, 9], timeout_s=30)   # ... there, by who has the ticket
    await read                                                   # they are here, with the checksums they left with
    await offer                                                  # and may change again there

The other way round `accept` gives a ticket for blocks that a peer may fill, by `write`; in any order and in parts. All
four are operations: awaited, cancelled, with a deadline; one that is over moves no byte any more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.transfer.hub import Hub, Writable
from kvolt.transfer.memory import Numbers, Slab
from kvolt.transfer.offered import Offered
from kvolt.transfer.operation import OperationEvent, OperationState, next_state
from kvolt.transfer.reading import Reading
from kvolt.transfer.wanted import ALL, Wanted, new_wanted
from kvolt.transfer.wire import Address, Offer, Ticket, read_ticket, ticket_bytes

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


class Operation:
    """One transfer, or one offer. Await it, from any loop: its path at the end, or why there is none."""

    def __init__(self, name: str, num_bytes: int, cancel: Callable[[], object]) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.path = ""
        """How its bytes went, once that is known."""
        self._cancel = cancel
        self._state = OperationState.INITIALIZED
        self._future: concurrent.futures.Future[str] = concurrent.futures.Future()

    @property
    def state(self) -> OperationState:
        return self._state

    def cancel(self) -> None:
        """Ask for its end; it is over when awaiting it says so."""
        self._cancel()

    def __await__(self) -> Generator[Any, None, str]:
        """Whoever awaits may go; the operation goes on."""
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    async def over(self) -> None:
        """Returns when no byte moves any more, however that came."""
        with contextlib.suppress(KvoltError):
            await self

    def result(self, timeout_s: float | None = None) -> str:
        """For threads without a loop. TimeoutError when it is not over by then."""
        return self._future.result(timeout_s)

    def begin(self) -> None:
        """By the agent: it has been asked for."""
        self._state = next_state(self.name, self._state, OperationEvent.START)

    def end(self, error: KvoltError | None) -> None:
        """By the agent: no byte moves any more."""
        self._state = next_state(self.name, self._state, _event_of(error))
        if error is None:
            self._future.set_result(self.path)
        else:
            self._future.set_exception(error)
            self._future.exception()  # known here: nobody has to ask


class Offering(Operation):
    """An operation that waits for a peer, who is given the ticket."""

    def __init__(self, ticket: Ticket, num_bytes: int, cancel: Callable[[], object]) -> None:
        super().__init__(f"{ticket.is_for} {ticket.secret:016x}", num_bytes, cancel)
        self.ticket = ticket_bytes(ticket)


class TransferAgent:
    """See the module. Its calls may come from any thread, and never wait."""

    def __init__(self, options: TransferOptions | None = None, clock: Clock | None = None) -> None:
        """ConfigError when it cannot be reached as asked."""
        options = options or TransferOptions()
        self._hub = Hub(
            options.host,
            options.port,
            options.advertise,
            options.shared_memory,
            clock or SystemClock(),
            options.nixl,
        )
        self._hub.progress.start()
        self._hub.progress.call(self._hub.start)

    @property
    def address(self) -> Address:
        return self._hub.address

    def close(self) -> None:
        """All that is under way is cancelled. Waits for it."""
        self._hub.progress.close(self._hub.close)

    # --- to be read

    def offer(self, slab: Slab, blocks: Blocks, timeout_s: float, seeds: bytes | None = None) -> Offering:
        """These blocks may be read once by who has the ticket; they must not change until that is over.

        `seeds`: eight bytes a block, which go into its checksum: who reads with others will not have it.
        """
        numbers = _some(slab, blocks, seeds)
        hub, ticket = self._hub, self._ticket(slab, numbers, "read")
        offering = Offering(
            ticket,
            len(numbers) * slab.block_bytes,
            lambda: hub.progress.call(lambda: hub.offers.take_back(ticket.secret)),
        )
        deadline = hub.progress.now() + timeout_s
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
    ) -> Operation:
        """Blocks of a ticket, those at `positions` or all, into these of ours, one each."""
        source = _ticket(ticket, "read")
        wanted = new_wanted(
            source,
            slab,
            slab.numbers(blocks),
            ALL if positions is None else np.ascontiguousarray(positions, dtype=np.int64),
            seeds,
            is_checked,
        )
        return self._read(wanted, timeout_s)

    def _read(self, wanted: Wanted, timeout_s: float) -> Operation:
        hub = self._hub

        def over(error: KvoltError | None) -> None:
            operation.path = reading.path
            operation.end(error)

        reading = Reading(wanted, over)
        operation = Operation(
            f"read {wanted.ticket.secret:016x}",
            wanted.num_bytes,
            lambda: hub.progress.call(lambda: reading.stop(Cancelled("the read was cancelled"))),
        )
        deadline = hub.progress.now() + timeout_s
        self._do(operation, lambda: hub.read(reading, deadline))
        return operation

    def decline(self, ticket: bytes) -> None:
        """Nobody will read these blocks: their owner need not wait. Told as well as can be, and not answered."""
        source, hub = _ticket(ticket, "read"), self._hub
        if source.address.agent == hub.address.agent:
            hub.progress.call(lambda: hub.offers.take_back(source.secret))
        else:
            hub.progress.call(lambda: hub.link_to(source.address).decline(source.secret))

    # --- to be written to

    def accept(self, slab: Slab, blocks: Blocks, timeout_s: float, seeds: bytes | None = None) -> Offering:
        """A peer may fill these blocks, each once, until all of them are or the time is over."""
        numbers = _some(slab, blocks, seeds)
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
            hub.progress.now() + timeout_s,
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
        numbers = _some(slab, blocks, seeds)
        places = np.arange(target.num_blocks) if positions is None else np.asarray(positions)
        if len(places) != len(numbers):
            raise InvalidRequest(f"{len(numbers)} blocks for {len(places)} of the peer", param="blocks")
        hub, source = self._hub, self._ticket(slab, numbers, "read")
        operation = Operation(
            f"write {target.secret:016x}",
            len(numbers) * slab.block_bytes,
            lambda: hub.progress.call(lambda: hub.offers.take_back(source.secret)),
        )
        deadline = hub.progress.now() + timeout_s

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
            hub.offer(source.secret, Offered(slab, numbers, deadline, over, seeds))
            packed = places.astype("<i8").tobytes()
            if target.address.agent == hub.address.agent:
                hub.take_offer(Offer(0, target.secret, packed, source, is_checked), taken)
            else:
                hub.link_to(target.address).offer(
                    lambda op: Offer(op, target.secret, packed, source, is_checked), taken
                )

        self._do(operation, begin)
        return operation

    # ---

    def _ticket(self, slab: Slab, numbers: Numbers, is_for: Any) -> Ticket:
        number = self._hub.number_of(slab)
        return Ticket(self._hub.address, secrets.randbits(64), slab.info(number), len(numbers), is_for)

    def _do(self, operation: Operation, begin: Callable[[], object]) -> None:
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


def _some(slab: Slab, blocks: Blocks, seeds: bytes | None) -> Numbers:
    numbers = slab.numbers(blocks)
    if not len(numbers):
        raise InvalidRequest("no blocks are nothing to move", param="blocks")
    if not slab.are_apart(numbers):
        raise InvalidRequest("a block is named twice", param="blocks")
    if seeds is not None and len(seeds) != 8 * len(numbers):
        raise InvalidRequest("a seed has eight bytes, and every block has one", param="seeds")
    return numbers


def _event_of(error: KvoltError | None) -> OperationEvent:
    match error:
        case None:
            return OperationEvent.FINISH
        case Cancelled():
            return OperationEvent.CANCEL
        case DeadlineExceeded():
            return OperationEvent.EXPIRE
        case _:
            return OperationEvent.FAIL
