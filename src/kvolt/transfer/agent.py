"""TransferAgent: moves blocks between this process and others. The public interface of `kvolt.transfer`.

    agent = TransferAgent()
    slab = Slab.shared(num_blocks=1024, block_bytes=65536)           # allocate once; blocks are indexes
    offer = agent.offer(slab, [3, 4, 5], timeout_s=30)               # source: offer blocks
    read = agent.read(offer.ticket, slab, [7, 8, 9], timeout_s=30)   # destination: read them with the ticket
    await read                                                       # the blocks have arrived, checksums verified
    await offer                                                      # the source may reuse its blocks

Both return an operation that can be awaited and cancelled and has a deadline. A finished operation moves no more bytes.

Two agents that share only a mailbox number and an address exchange a message in either order:

    agent.post(mailbox, message, timeout_s=30)                       # one side
    message = await agent.receive(address, mailbox, timeout_s=30)    # other side; `agent.address_text` of the first
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvolt.core.errors import Cancelled, InvalidRequest, KvoltError, Overloaded, PayloadTooLarge
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.paths.capabilities import MachineFacts, capabilities_of
from kvolt.transfer.paths.machine import probe_machine
from kvolt.transfer.paths.path_watch import PathOptions, PathWatch
from kvolt.transfer.peer.handshakes import TlsContexts
from kvolt.transfer.peer.hub import Hub, ListenOptions
from kvolt.transfer.peer.mailbox import MAX_MAILBOX, PostedMessage, Waiter
from kvolt.transfer.peer.offers import Offer
from kvolt.transfer.peer.sockets import format_address, parse_address
from kvolt.transfer.reads import wire
from kvolt.transfer.reads.read_op import ReadOp
from kvolt.transfer.reads.read_request import ALL, new_read_request
from kvolt.transfer.reads.wire import MAX_BLOCKS, MAX_MESSAGE_BYTES, SECRET_BYTES, Address, Ticket
from kvolt.transfer.transfer_handle import ReceiveHandle, TransferHandle

log = logging.getLogger(__name__)

Blocks = Sequence[int] | Numbers


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listening address and enabled transfer paths of an agent."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    """Address published to peers; None: `host`."""
    shared_memory: bool = True
    """If False, peers on the same host use TCP."""
    nixl: bool = False
    """Read over NIXL from peers that also enable it, where NIXL has a one-sided path. NIXL must be installed."""
    self_test: bool = False
    """Measure the paths to a peer after the first read from it, and allow peers to measure paths to this agent."""


Operation = TransferHandle[str]
"""Handle of one transfer or offer. Its result is the name of the path, if known."""


class OfferHandle(Operation):
    """Operation that waits for a peer holding its ticket."""

    def __init__(self, ticket: Ticket, cancel: Callable[[], object]) -> None:
        super().__init__(cancel, "")
        self.ticket = wire.encode_ticket(ticket)


class TransferAgent:
    """See the module. Methods may be called from any thread and never block."""

    def __init__(
        self,
        options: TransferOptions | None = None,
        clock: Clock | None = None,
        facts: MachineFacts | None = None,
        credentials: TlsContexts | None = None,
    ) -> None:
        """`facts`: result of `machine.probe_machine`; None: probe without UCX settings. `credentials`: of this process,
        for mutual TLS on TCP connections; None: plain TCP.

        ConfigError if the address cannot be bound.
        """
        options = options or TransferOptions()
        capabilities = capabilities_of(facts or probe_machine({}), options.shared_memory, options.nixl)
        self._hub = Hub(
            ListenOptions(options.host, options.port, options.advertise, options.shared_memory, credentials),
            clock or SystemClock(),
            options.nixl,
            PathOptions(capabilities=capabilities, self_test=options.self_test),
        )
        if credentials is not None and options.nixl:
            log.warning("transfers over NIXL are not encrypted: only TCP connections have TLS")
        self._hub.progress.start()
        self._hub.progress.call_soon(self._hub.start)

    @property
    def address(self) -> Address:
        return self._hub.address

    @property
    def address_text(self) -> str:
        """Address as text, the argument of `receive`."""
        return format_address(self._hub.address)

    @property
    def paths(self) -> PathWatch:
        """Measured path speeds and slow-path reports."""
        return self._hub.paths

    @property
    def frame_budget(self) -> ByteBudget:
        """Budget for incomplete frames of peers."""
        return self._hub.frame_budget

    @property
    def num_refused(self) -> int:
        """Connections refused because of a limit."""
        return self._hub.num_refused + self.handshakes["limit"]

    @property
    def num_refused_reads(self) -> int:
        """Reads of offers that were made for another process."""
        return self._hub.num_refused_reads

    @property
    def handshakes(self) -> Counter[str]:
        """TLS handshakes of accepted connections by outcome; empty without TLS."""
        return Counter() if self._hub.handshakes is None else self._hub.handshakes.outcomes

    def close(self) -> None:
        """Cancel all operations and wait for them."""
        self._hub.progress.close(self._hub.close)

    # --- reading

    def offer(
        self,
        slab: Slab,
        blocks: Blocks,
        timeout_s: float,
        seeds: bytes | None = None,
        reader_key: bytes = b"",
    ) -> OfferHandle:
        """Allow the holder of the ticket to read these blocks once; they must not change until the offer is done.

        `seeds`: eight bytes per block, mixed into its checksum. A reader with different seeds fails verification.
        `reader_key`: a peer with a certificate also needs the proof of this key for its identity (`wire.bind_ticket`).
        """
        numbers, deadline = _check_blocks(slab, blocks, seeds), self._hub.deadline_in(timeout_s)
        hub, ticket = self._hub, self._ticket(slab, numbers)
        handle = OfferHandle(ticket, self._soon(partial(hub.offers.withdraw, ticket.secret)))
        offer = Offer(slab, numbers, deadline, handle.finish, seeds, reader_key)
        self._start(handle, lambda: hub.offer(ticket.secret, offer))
        return handle

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
        """Read a ticket's blocks (all, or those at `positions`) into local blocks, one each.

        `is_last`: this read completes the offer. A reader that splits the heads of blocks over several slabs reads the
        ticket once per slab, sequentially.
        """
        source_positions = ALL if positions is None else np.ascontiguousarray(positions, dtype=np.int64)
        source = wire.decode_ticket(ticket)
        request = new_read_request(source, slab, slab.numbers(blocks), source_positions, seeds, is_checked)
        hub, deadline = self._hub, self._hub.deadline_in(timeout_s)

        def on_done(error: KvoltError | None) -> None:
            operation.value = read_op.path
            operation.finish(error)

        read_op = ReadOp(request, on_done, is_last)
        operation = Operation(self._soon(lambda: read_op.stop(Cancelled("the read was cancelled"))), "")
        self._start(operation, lambda: hub.read(read_op, deadline))
        return operation

    def decline(self, ticket: bytes) -> None:
        """Tell the owner, best effort, that the ticket will not be used."""
        source, hub = wire.decode_ticket(ticket), self._hub

        def decline() -> None:
            if source.address == hub.address:
                hub.offers.withdraw(source.secret)
            elif not hub.is_closed:
                with contextlib.suppress(Overloaded):
                    hub.link_to(source.address).decline(source)

        hub.progress.call_soon(decline)

    # --- mailboxes

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> TransferHandle[None]:
        """Leave a message that one peer can fetch once. The mailbox number, 63 random bits, is the secret.

        Done when the message was sent, withdrawn or expired. A mailbox number in use raises InvalidRequest on await.
        """
        _check_mailbox(mailbox)
        if len(message) > MAX_MESSAGE_BYTES:
            raise PayloadTooLarge(
                f"message has {len(message)} bytes, limit is {MAX_MESSAGE_BYTES}",
                limit_bytes=MAX_MESSAGE_BYTES,
                size_bytes=len(message),
            )
        hub = self._hub
        handle: TransferHandle[None] = TransferHandle(
            self._soon(lambda: hub.mailboxes.withdraw(posted)), None
        )
        posted = PostedMessage(mailbox, bytes(message), hub.deadline_in(timeout_s), handle.finish)
        self._start(handle, lambda: hub.mailboxes.post(posted))
        return handle

    def receive(self, address: str, mailbox: int, timeout_s: float) -> ReceiveHandle:
        """Wait for the message in a mailbox of the agent at `address` (its `address_text`)."""
        _check_mailbox(mailbox)
        peer, hub = parse_address(address), self._hub

        def on_message(message: bytes) -> bool:
            handle.value = message
            handle.finish(None)
            return True

        def stop() -> None:
            if not handle.state.is_done:
                waiter.fail(Cancelled("the receive was cancelled"))

        handle = ReceiveHandle(self._soon(stop), b"")
        waiter = Waiter(mailbox, hub.deadline_in(timeout_s), on_message, handle.finish)
        self._start(handle, lambda: hub.receive(peer, waiter))
        return handle

    def _soon(self, call: Callable[[], None]) -> Callable[[], object]:
        """Function that runs `call` in the progress thread."""
        return partial(self._hub.progress.call_soon, call)

    def _ticket(self, slab: Slab, numbers: Numbers) -> Ticket:
        number = self._hub.slab_number(slab)
        return Ticket(self._hub.address, secrets.token_bytes(SECRET_BYTES), slab.info(number), len(numbers))

    def _start(self, operation: TransferHandle[Any], begin: Callable[[], object]) -> None:
        """Run `begin` in the progress thread; finish the operation with its error if it fails."""

        def run() -> None:
            operation.start()
            if self._hub.is_closed:
                operation.finish(Cancelled("the agent is closed"))
                return
            try:
                begin()
            except KvoltError as error:
                operation.finish(error)

        if not self._hub.progress.call_soon(run):
            run()


def _check_mailbox(mailbox: int) -> None:
    if not 0 <= mailbox <= MAX_MAILBOX:
        raise InvalidRequest("a mailbox number has 63 bits", param="mailbox")


def _check_blocks(slab: Slab, blocks: Blocks, seeds: bytes | None) -> Numbers:
    numbers = slab.numbers(blocks)
    if not len(numbers):
        raise InvalidRequest("the list of blocks is empty", param="blocks")
    if len(numbers) > MAX_BLOCKS:
        raise InvalidRequest(f"at most {MAX_BLOCKS} blocks per transfer: split it", param="blocks")
    if not slab.are_unique(numbers):
        raise InvalidRequest("duplicate block number", param="blocks")
    if seeds is not None and len(seeds) != 8 * len(numbers):
        raise InvalidRequest("seeds must have eight bytes per block", param="seeds")
    return numbers
