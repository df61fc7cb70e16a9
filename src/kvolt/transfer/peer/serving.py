"""ServingSession: serves one incoming connection of a peer that reads local blocks.

Over a Unix socket the peer maps our shared memory and copies by itself; it needs block numbers, checksums and a hold on
the blocks. Over TCP the blocks are sent on a second connection, which the peer binds to the session with its key.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvolt.core.errors import (
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unsupported,
    to_info,
)
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.security.identity import identity_of
from kvolt.transfer.memory.device_memory import DeviceMemory, MemoryKind
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.memory.staging import Staging
from kvolt.transfer.nixl.path import Nixl
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.transfer.peer.checksum_task import ChecksumTask
from kvolt.transfer.peer.chunks import ChunkSender, OutgoingBlocks
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.mailbox import Mailboxes, Waiter
from kvolt.transfer.peer.offers import MAX_PIECES, CheckedFetch, Offer, Offers, check_fetch
from kvolt.transfer.reads import wire
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.read_op import NIXL

log = logging.getLogger(__name__)

MAX_READS = 4096
"""Concurrent reads of one peer."""
HELLO_S = 10.0
"""Deadline for the Hello message."""


@dataclass(slots=True, eq=False)
class _PeerRead:
    """A peer's read of local blocks."""

    secret: bytes
    offer: Offer
    num_pieces: int = 0
    outgoing: OutgoingBlocks | None = None


class SessionOwner(Protocol):
    """The hub as its sessions use it."""

    address: wire.Address
    progress: ProgressThread
    nixl: Nixl | None
    frame_budget: ByteBudget
    paths: PathWatch
    offers: Offers
    mailboxes: Mailboxes

    def deadline_in(self, timeout_s: float) -> float: ...

    def slab_number(self, slab: Slab) -> int: ...

    def register_chunk_key(self, session: ServingSession) -> None: ...

    def claim_chunk_key(self, key: str) -> ServingSession: ...

    def remove_session(self, session: ServingSession) -> None: ...


class ServingSession:
    """See the module. Progress thread only."""

    def __init__(self, hub: SessionOwner, link: socket.socket) -> None:
        self._hub = hub
        self._link = FrameConnection(
            hub.progress, link, self._on_message, self._on_lost, wire.MAX_GREETING_BYTES, hub.frame_budget
        )
        self._reader = identity_of(link.getpeercert()).uri if isinstance(link, ssl.SSLSocket) else None
        """Identity in the peer's certificate; None without TLS."""
        self._peer: str | None = None
        """Agent id from Hello; None before."""
        self.key = secrets.token_hex(16)
        """Key with which the peer binds its chunk connection."""
        self._chunk_sender: ChunkSender | None = None
        self._reads: dict[int, _PeerRead] = {}
        self._waiters: dict[int, Waiter] = {}
        """Waiters of the peer for local mailboxes."""
        self._num_pieces = 0
        """Sum over all reads."""
        self._described_slabs: set[int] = set()
        self._nixl_slabs: dict[int, wire.NixlSlab] = {}
        """Descriptions already sent to the peer."""
        self._nixl_ops: set[int] = set()
        """Ops that still need our NIXL agent: until the peer sends Ended, even if finished here."""
        self._staging = Staging()
        self._hello_timer = hub.progress.call_at(hub.progress.now() + HELLO_S, self._on_hello_timeout)

    def close(self) -> None:
        self._link.close()
        self._close_ops()

    def _on_lost(self, error: KvoltError) -> None:
        if isinstance(error, ProtocolError):
            log.warning("peer disconnected: peer=%s error=%s", self._peer or "unknown", error)
        self._close_ops()

    def _on_hello_timeout(self) -> None:
        log.warning("peer disconnected: no hello within %s s", HELLO_S)
        self.close()

    def _close_ops(self) -> None:
        self._hello_timer.cancel()
        if self._chunk_sender is not None:
            self._chunk_sender.close()
        for op in [*self._reads, *self._nixl_ops, *self._waiters]:
            self._end_op(op, is_whole=False)
        self._hub.remove_session(self)

    def revoke_offer(self, offer: Offer, error: KvoltError) -> None:
        """Stop all reads of this offer and report the error to the peer."""
        for op, read in list(self._reads.items()):
            if read.offer is offer:
                self._drop_read(op)
                self._link.send(wire.Failed(op, to_info(error)))

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Hello() if self._peer is None:
                self._on_hello(message)
            case _ if self._peer is None:
                raise ProtocolError("expected Hello as the first message", rule="hello")
            case wire.Fetch():
                self._on_fetch(message)
            case wire.Receive():
                self._on_receive(message)
            case wire.Ended(op, is_whole):
                self._end_op(op, is_whole)
            case wire.Declined(secret, proof):
                self._hub.offers.decline(secret, proof, self._reader)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__} from a reader", rule="direction")

    def _on_hello(self, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise ProtocolError(
                f"peer has protocol version {hello.version}, this agent has {wire.VERSION}", rule="version"
            )
        if hello.carries == "chunks":
            session = self._hub.claim_chunk_key(hello.key)
            self._link.send(wire.Welcome(self._hub.address.agent))
            if self._link.is_open:
                session.attach_chunk_socket(self._link.detach())
                self._close_ops()
            return
        self._peer = hello.agent
        self._hello_timer.cancel()
        self._link.raise_frame_limit()
        self._hub.register_chunk_key(self)
        also_serves = () if self._hub.nixl is None else (NIXL,)
        capabilities = self._hub.paths.capabilities
        self._link.send(
            wire.Welcome(
                self._hub.address.agent, also_serves=also_serves, key=self.key, capabilities=capabilities
            )
        )

    def attach_chunk_socket(self, link: socket.socket) -> None:
        """Send chunks over this socket from now on."""
        self._chunk_sender = ChunkSender(self._hub.progress, link, self.close)

    # --- reads

    def _on_fetch(self, fetch: wire.Fetch) -> None:
        try:
            self._start_fetch(fetch)
        except KvoltError as error:
            self._link.send(wire.Failed(fetch.op, to_info(error)))

    def _start_fetch(self, fetch: wire.Fetch) -> None:
        self._check_op(fetch.op)
        if max(len(self._reads), len(self._nixl_ops)) >= MAX_READS:
            raise Overloaded(
                f"too many concurrent reads of one peer: limit is {MAX_READS}", queue="reads", limit=MAX_READS
            )
        offer = self._hub.offers.begin_read(fetch.secret, fetch.proof, self._reader)
        read = _PeerRead(fetch.secret, offer)
        # Register before sending: a send may reveal that the peer is gone, which ends all its reads.
        self._reads[fetch.op] = read
        try:
            checked = check_fetch(read.offer, fetch, MAX_PIECES - self._num_pieces)
            read.num_pieces = len(checked.pieces.offsets)
            self._num_pieces += read.num_pieces
            self._serve(fetch, read, checked)
        except BaseException:
            self._end_op(fetch.op, is_whole=False)
            raise

    def _check_op(self, op: int) -> None:
        if op in self._reads or op in self._nixl_ops or op in self._waiters:
            raise InvalidRequest(f"op {op} is in use", param="op")

    def _serve(self, fetch: wire.Fetch, read: _PeerRead, checked: CheckedFetch) -> None:
        op, slab = fetch.op, read.offer.slab
        match fetch.path:
            case "shm":
                self._serve_shared(op, slab, checked.blocks)
                if fetch.is_checked:
                    self._hub.progress.schedule(self._checksum_task(op, read, checked))
            case "tcp":
                if self._chunk_sender is None:
                    raise NotFound("no chunk connection", kind="connection", name="tcp")
                read.outgoing = OutgoingBlocks(
                    op, slab.memory, checked.pieces, checked.seeds, fetch.is_checked
                )
                if slab.device is not None:
                    read.outgoing.stage = partial(self._stage, op, slab.device)
                self._chunk_sender.send(read.outgoing)
            case wire.CUDA_IPC:
                self._serve_device(op, slab, checked.blocks)
                if fetch.is_checked:
                    self._hub.progress.schedule(self._checksum_task(op, read, checked))
            case "nixl" if self._hub.nixl is not None:
                self._nixl_ops.add(op)
                self._hub.nixl.start_serving()
                self._hub.nixl.when_ready(lambda: self._serve_nixl(fetch, read, checked))
            case path:
                raise Unsupported(f"this agent does not serve the path {path!r}", feature=path)

    def _serve_shared(self, op: int, slab: Slab, blocks: Numbers) -> None:
        descriptor = slab.read_only() if slab.kind is MemoryKind.SHARED and self._link.is_unix else None
        if descriptor is None:
            raise Unsupported("the memory cannot be mapped by a peer", feature="shm")
        number = self._hub.slab_number(slab)
        if number not in self._described_slabs:
            try:
                self._link.send(wire.SharedSlab(slab.info(number), has_descriptor=True), descriptor)
            except OSError as error:
                message = f"out of file descriptors: {error}"
                raise Overloaded(message, queue="descriptors") from None
            self._described_slabs.add(number)
        self._link.send(wire.Ready(op, number, blocks.tobytes()))

    def _serve_device(self, op: int, slab: Slab, blocks: Numbers) -> None:
        # The handle grants write access as well: only for processes of this host and user.
        is_trusted = self._link.is_unix and wire.CUDA_IPC in self._hub.paths.capabilities.paths
        handle = slab.device.handle if slab.device is not None and is_trusted else None
        if handle is None:
            raise Unsupported("the memory cannot be opened by a peer", feature=wire.CUDA_IPC)
        number = self._hub.slab_number(slab)
        if number not in self._described_slabs:
            self._described_slabs.add(number)
            self._link.send(wire.DeviceSlab(slab.info(number), handle))
        self._link.send(wire.Ready(op, number, blocks.tobytes()))

    def _serve_nixl(self, fetch: wire.Fetch, read: _PeerRead, checked: CheckedFetch) -> None:
        if self._reads.get(fetch.op) is not read or self._hub.nixl is None:
            return  # cancelled
        slab = read.offer.slab
        number = self._hub.slab_number(slab)
        try:
            description = self._hub.nixl.describe(slab, number)
        except KvoltError as error:
            self._fail(fetch.op, error)
            return
        if self._nixl_slabs.get(number) != description:
            self._nixl_slabs[number] = description
            self._link.send(description)
        self._link.send(wire.Ready(fetch.op, number, checked.blocks.tobytes()))
        if fetch.is_checked:
            self._hub.progress.schedule(self._checksum_task(fetch.op, read, checked))

    def _checksum_task(self, op: int, read: _PeerRead, checked: CheckedFetch) -> ChecksumTask:
        return ChecksumTask(
            read.offer.slab,
            checked.pieces,
            checked.seeds,
            is_wanted=lambda: self._reads.get(op) is read,
            on_checksums=lambda first, sums: self._link.send(wire.Checksums(op, first, sums)),
            on_error=lambda error: self._fail(op, error),
        )

    def _stage(self, op: int, device: DeviceMemory, pieces: Pieces) -> tuple[memoryview, Pieces] | None:
        """Copy device blocks into a send buffer."""
        try:
            return self._staging.fill(device, pieces)
        except KvoltError as error:
            self._fail(op, error)
            return None

    def _fail(self, op: int, error: KvoltError) -> None:
        self._end_op(op, is_whole=False)
        self._link.send(wire.Failed(op, to_info(error)))

    def _drop_read(self, op: int) -> _PeerRead | None:
        read = self._reads.pop(op, None)
        if read is not None:
            self._num_pieces -= read.num_pieces
            if read.outgoing is not None and self._chunk_sender is not None:
                self._chunk_sender.drop(read.outgoing)
        return read

    def _end_op(self, op: int, is_whole: bool) -> None:
        waiter = self._waiters.pop(op, None)
        if waiter is not None:
            waiter.cancel()
        read = self._drop_read(op)
        if read is not None:
            self._hub.offers.end_read(read.secret, is_whole)
        if op in self._nixl_ops and self._hub.nixl is not None:
            self._nixl_ops.discard(op)
            self._hub.nixl.stop_serving()

    # --- mailboxes

    def _on_receive(self, request: wire.Receive) -> None:
        op = request.op

        def deliver(message: bytes) -> bool:
            self._waiters.pop(op, None)
            self._link.send(wire.Delivered(op, message))
            return self._link.is_open

        def fail(error: KvoltError) -> None:
            self._waiters.pop(op, None)
            self._link.send(wire.Failed(op, to_info(error)))

        try:
            self._check_op(op)
            waiter = Waiter(request.mailbox, self._hub.deadline_in(request.timeout_s), deliver, fail)
        except KvoltError as error:
            self._link.send(wire.Failed(op, to_info(error)))
            return
        self._waiters[op] = waiter
        try:
            self._hub.mailboxes.wait_local(waiter)
        except KvoltError as error:
            waiter.fail(error)
