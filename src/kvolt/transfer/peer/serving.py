"""Serving: what a peer that reads from us is answered. One `Served` for each connection that came in.

Over a Unix socket a peer maps our shared memory and reads by itself; what it needs of us are the numbers of the blocks,
their checksums, and that they stay. Over TCP their bytes are sent: over a connection of their own, which belongs to the
one that has its key.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvolt.core.errors import (
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unsupported,
    to_info,
)
from kvolt.transfer.memory.slabs import Numbers, Pieces, Slab
from kvolt.transfer.memory.staging import Staging
from kvolt.transfer.nixl.path import NIXL
from kvolt.transfer.paths.lanes import MemoryKind
from kvolt.transfer.peer import wire
from kvolt.transfer.peer.checksum_task import Summing
from kvolt.transfer.peer.chunks import ChunkSender, Outgoing
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.fetch_check import MAX_PIECES, Fetched, fetched
from kvolt.transfer.peer.mailbox import Guest
from kvolt.transfer.peer.offers import Offered
from kvolt.transfer.peer.wire import (
    MAX_GREETING_BYTES,
    VERSION,
    Declined,
    Described,
    DeviceSlab,
    Ended,
    Failed,
    Fetch,
    Hello,
    Meet,
    Message,
    Met,
    NixlSlab,
    Offer,
    Ready,
    Sums,
    Taken,
    Welcome,
)

if TYPE_CHECKING:
    from kvolt.transfer.peer.hub import Hub

log = logging.getLogger(__name__)

MAX_READS = 4096
"""Of one peer at a time."""
HELLO_S = 10.0
"""For a peer to say who it is."""


@dataclass(slots=True, eq=False)
class _Read:
    """By a peer, of ours."""

    secret: int
    offered: Offered
    num_pieces: int = 0
    outgoing: Outgoing | None = None


class Served:
    """See the module. In the progress thread only."""

    def __init__(self, hub: Hub, link: socket.socket) -> None:
        self._hub = hub
        self._link = FrameConnection(
            hub.progress, link, self._on_message, self._lost, MAX_GREETING_BYTES, hub.unfinished
        )
        self._peer: str | None = None
        """By its own word; None until it has said so."""
        self.key = secrets.token_hex(16)
        """Who has it may take this connection's chunks."""
        self._sender: ChunkSender | None = None
        self._reads: dict[int, _Read] = {}
        self._guests: dict[int, Guest] = {}
        """The peer's, that wait in our rooms."""
        self._num_pieces = 0
        """Of all reads."""
        self._described: set[int] = set()
        self._nixl_slabs: dict[int, NixlSlab] = {}
        """That the peer was told."""
        self._over_nixl: set[int] = set()
        """Ops whose reader may need our NIXL: until it says that it reads no more, even if they are over for us."""
        self._staging = Staging()
        self._hello = hub.progress.at(hub.progress.now() + HELLO_S, self._is_late)

    def close(self) -> None:
        self._link.close()
        self._ended()

    def _lost(self, error: KvoltError) -> None:
        if isinstance(error, ProtocolError):
            log.warning("a peer (%s) is let go: %s", self._peer or "that said no hello", error)
        self._ended()

    def _is_late(self) -> None:
        log.warning("a peer that has not said hello within %s s is let go", HELLO_S)
        self.close()

    def _ended(self) -> None:
        self._hello.cancel()
        if self._sender is not None:
            self._sender.close()
        for op in [*self._reads, *self._over_nixl, *self._guests]:
            self._end(op, is_whole=False)
        self._hub.gone(self)

    def revoke(self, offered: Offered, error: KvoltError) -> None:
        """What is offered is over: whoever reads it is told to stop."""
        for op, read in list(self._reads.items()):
            if read.offered is offered:
                self._drop(op)
                self._link.send(Failed(op, to_info(error)))

    def _on_message(self, message: Message) -> None:
        match message:
            case Hello() if self._peer is None:
                self._greet(message)
            case _ if self._peer is None:
                raise ProtocolError("a peer that did not say hello", rule="hello")
            case Fetch():
                self._fetch(message)
            case Meet():
                self._meet(message)
            case Ended(op, is_whole):
                self._end(op, is_whole)
            case Declined(secret):
                self._hub.offers.take_back(secret)
            case Offer():
                self._hub.take_offer(message, self._answer(message.op))
            case _:
                raise ProtocolError(f"{type(message).__name__} from who reads", rule="direction")

    def _greet(self, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ProtocolError(f"a peer of version {hello.version}, ours is {VERSION}", rule="version")
        if hello.carries == "chunks":
            belongs_to = self._hub.take_key(hello.key)
            self._link.send(Welcome(self._hub.address.agent))
            if self._link.is_open:
                belongs_to.send_chunks_over(self._link.detach())
                self._ended()
            return
        self._peer = hello.agent
        self._hello.cancel()
        self._link.let_in()
        self._hub.give_key(self)
        also_serves = () if self._hub.nixl is None else (NIXL,)
        can = self._hub.paths.can
        self._link.send(Welcome(self._hub.address.agent, also_serves=also_serves, key=self.key, can=can))

    def send_chunks_over(self, link: socket.socket) -> None:
        """Of what this peer reads over TCP, from now on."""
        self._sender = ChunkSender(self._hub.progress, link, self.close)

    def _answer(self, op: int) -> Callable[[KvoltError | None], None]:
        return lambda error: self._link.send(Taken(op, None if error is None else to_info(error)))

    # --- a peer reads

    def _fetch(self, asked: Fetch) -> None:
        try:
            self._begin(asked)
        except KvoltError as error:
            self._link.send(Failed(asked.op, to_info(error)))

    def _begin(self, asked: Fetch) -> None:
        self._check_number(asked.op)
        if max(len(self._reads), len(self._over_nixl)) >= MAX_READS:
            raise Overloaded(
                f"a peer reads {MAX_READS} offers at a time at most", queue="reads", limit=MAX_READS
            )
        read = _Read(asked.secret, self._hub.offers.begin(asked.secret))
        # Known before anything is sent: to send may show that the peer is gone, and then all that it reads ends.
        self._reads[asked.op] = read
        try:
            found = fetched(read.offered, asked, MAX_PIECES - self._num_pieces)
            read.num_pieces = len(found.pieces.offsets)
            self._num_pieces += read.num_pieces
            self._serve(asked, read, found)
        except BaseException:
            self._end(asked.op, is_whole=False)
            raise

    def _check_number(self, op: int) -> None:
        if op in self._reads or op in self._over_nixl or op in self._guests:
            raise InvalidRequest(f"the number {op} is taken", param="op")

    def _serve(self, asked: Fetch, read: _Read, found: Fetched) -> None:
        op, slab = asked.op, read.offered.slab
        match asked.path:
            case "shm":
                self._show(op, slab, found.blocks)
                if asked.is_checked:
                    self._hub.progress.work(self._summing(op, read, found))
            case "tcp":
                if self._sender is None:
                    told = "there is no connection to send blocks over"
                    raise NotFound(told, kind="connection", name="tcp")
                read.outgoing = Outgoing(op, slab.memory, found.pieces, found.seeds, asked.is_checked)
                if slab.kind in (MemoryKind.FILE, MemoryKind.DEVICE):
                    read.outgoing.stage = partial(self._stage, op, slab)
                self._sender.send(read.outgoing)
            case wire.CUDA_IPC:
                self._show_device(op, slab, found.blocks)
                if asked.is_checked:
                    self._hub.progress.work(self._summing(op, read, found))
            case "nixl" if self._hub.nixl is not None:
                self._over_nixl.add(op)
                self._hub.nixl.serve()
                self._hub.nixl.when_ready(lambda: self._show_nixl(asked, read, found))
            case path:
                raise Unsupported(f"this agent serves no path {path!r}", feature=path)

    def _show(self, op: int, slab: Slab, blocks: Numbers) -> None:
        descriptor = slab.read_only() if slab.kind is MemoryKind.SHARED and self._link.is_unix else None
        if descriptor is None:
            raise Unsupported("this memory cannot be mapped by a peer", feature="shm")
        number = self._hub.number_of(slab)
        if number not in self._described:
            try:
                self._link.send(Described(slab.info(number), has_descriptor=True), descriptor)
            except OSError as error:
                told = f"no descriptor is left for a peer: {error}"
                raise Overloaded(told, queue="descriptors") from None
            self._described.add(number)
        self._link.send(Ready(op, number, blocks.tobytes()))

    def _show_device(self, op: int, slab: Slab, blocks: Numbers) -> None:
        # Who has a handle may write, too: it is given to processes of this host and user only.
        is_trusted = self._link.is_unix and wire.CUDA_IPC in self._hub.paths.can.paths
        handle = slab.device.handle if slab.device is not None and is_trusted else None
        if handle is None:
            raise Unsupported("this memory cannot be opened by a peer", feature=wire.CUDA_IPC)
        number = self._hub.number_of(slab)
        if number not in self._described:
            self._described.add(number)
            self._link.send(DeviceSlab(slab.info(number), handle))
        self._link.send(Ready(op, number, blocks.tobytes()))

    def _show_nixl(self, asked: Fetch, read: _Read, found: Fetched) -> None:
        if self._reads.get(asked.op) is not read or self._hub.nixl is None:
            return  # nobody waits for it any more
        slab = read.offered.slab
        number = self._hub.number_of(slab)
        try:
            told = self._hub.nixl.describe(slab, number)
        except KvoltError as error:
            self._fail(asked.op, error)
            return
        if self._nixl_slabs.get(number) != told:
            self._nixl_slabs[number] = told
            self._link.send(told)
        self._link.send(Ready(asked.op, number, found.blocks.tobytes()))
        if asked.is_checked:
            self._hub.progress.work(self._summing(asked.op, read, found))

    def _summing(self, op: int, read: _Read, found: Fetched) -> Summing:
        return Summing(
            read.offered.slab,
            found.pieces,
            found.seeds,
            is_wanted=lambda: self._reads.get(op) is read,
            tell=lambda first, sums: self._link.send(Sums(op, first, sums)),
            fail=lambda error: self._fail(op, error),
        )

    def _stage(self, op: int, slab: Slab, pieces: Pieces) -> tuple[memoryview, Pieces] | None:
        """Blocks that are not in the host's memory, to be sent."""
        try:
            return self._staging.fill(slab, pieces)
        except KvoltError as error:
            self._fail(op, error)
            return None

    def _fail(self, op: int, error: KvoltError) -> None:
        self._end(op, is_whole=False)
        self._link.send(Failed(op, to_info(error)))

    def _drop(self, op: int) -> _Read | None:
        read = self._reads.pop(op, None)
        if read is not None:
            self._num_pieces -= read.num_pieces
            if read.outgoing is not None and self._sender is not None:
                self._sender.drop(read.outgoing)
        return read

    def _end(self, op: int, is_whole: bool) -> None:
        guest = self._guests.pop(op, None)
        if guest is not None:
            guest.go()
        read = self._drop(op)
        if read is not None:
            self._hub.offers.end(read.secret, is_whole)
        if op in self._over_nixl and self._hub.nixl is not None:
            self._over_nixl.discard(op)
            self._hub.nixl.serve_no_more()

    # --- a peer waits for the note of a room

    def _meet(self, asked: Meet) -> None:
        op = asked.op

        def give(note: bytes) -> bool:
            self._guests.pop(op, None)
            self._link.send(Met(op, note))
            return self._link.is_open

        def fail(error: KvoltError) -> None:
            self._guests.pop(op, None)
            self._link.send(Failed(op, to_info(error)))

        try:
            self._check_number(op)
            guest = Guest(asked.room, self._hub.deadline_in(asked.timeout_s), give, fail)
        except KvoltError as error:
            self._link.send(Failed(op, to_info(error)))
            return
        self._guests[op] = guest
        try:
            self._hub.rooms.meet_here(guest)
        except KvoltError as error:
            guest.fail(error)
