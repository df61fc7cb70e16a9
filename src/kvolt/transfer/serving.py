"""Serving: what a peer that reads from us is answered. One `Served` for each connection that came in.

Over a Unix socket a peer maps our shared memory and reads by itself; what it needs of us are the numbers of the blocks,
their checksums, and that they stay. Over TCP their bytes are sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvolt.core.errors import (
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unsupported,
    to_info,
)
from kvolt.transfer import block_bytes
from kvolt.transfer.chunks import ChunkSender, Outgoing
from kvolt.transfer.chunks import Sums as Sums64
from kvolt.transfer.connection import FrameConnection
from kvolt.transfer.file_path import Staging
from kvolt.transfer.lanes import MemoryKind
from kvolt.transfer.memory import Numbers, Pieces, Slab
from kvolt.transfer.nixl_path import NIXL
from kvolt.transfer.offered import Offered, chosen
from kvolt.transfer.wire import (
    VERSION,
    Declined,
    Described,
    Ended,
    Failed,
    Fetch,
    Hello,
    Message,
    NixlSlab,
    Offer,
    Ready,
    Sums,
    Taken,
    Welcome,
)

if TYPE_CHECKING:
    from kvolt.transfer.hub import Hub

MAX_READS = 4096
"""Of one peer at a time."""
TURN_BYTES = 4 << 20
"""Work of a turn: a millisecond or so."""


@dataclass(slots=True)
class _Read:
    """By a peer, of ours."""

    secret: int
    offered: Offered
    outgoing: Outgoing | None = None


class Served:
    """See the module. In the progress thread only."""

    def __init__(self, hub: Hub, link: socket.socket) -> None:
        self._hub = hub
        self._link = FrameConnection(hub.progress, link, self._on_message, lambda error: self._lost())
        self._agent: str | None = None
        self._sender: ChunkSender | None = None
        self._reads: dict[int, _Read] = {}
        self._described: set[int] = set()
        self._nixl_slabs: dict[int, NixlSlab] = {}
        """That the peer was told."""
        self._over_nixl: set[int] = set()
        """Ops whose reader may need our NIXL: until it says that it reads no more, even if they are over for us."""
        self._staging = Staging()

    def close(self) -> None:
        self._link.close()
        if self._sender is not None:
            self._sender.close()
        self._lost()

    def _lost(self) -> None:
        for op in [*self._reads, *self._over_nixl]:
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
            case Hello():
                self._greet(message)
            case _ if self._agent is None:
                raise ProtocolError("a peer that did not say hello", rule="hello")
            case Fetch():
                self._fetch(message)
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
        self._agent = hello.agent
        also_serves = () if self._hub.nixl is None else (NIXL,)
        self._link.send(Welcome(self._hub.address.agent, also_serves=also_serves))
        if hello.carries == "chunks":
            sender = ChunkSender(self._hub.progress, self._link.detach(), lambda: self._hub.gone(self))
            self._hub.senders[hello.agent] = sender
            self._sender = sender

    def _answer(self, op: int) -> Callable[[KvoltError | None], None]:
        return lambda error: self._link.send(Taken(op, None if error is None else to_info(error)))

    def _fetch(self, asked: Fetch) -> None:
        try:
            self._begin(asked)
        except KvoltError as error:
            self._link.send(Failed(asked.op, to_info(error)))

    def _begin(self, asked: Fetch) -> None:
        if asked.op in self._reads:
            raise InvalidRequest(f"the number {asked.op} is taken", param="op")
        if max(len(self._reads), len(self._over_nixl)) >= MAX_READS:
            raise Overloaded(
                f"a peer reads {MAX_READS} offers at a time at most", queue="reads", limit=MAX_READS
            )
        offered = self._hub.offers.begin(asked.secret)
        try:
            blocks = chosen(offered.blocks, _numbers(asked.positions))
            pieces = _pieces(offered.slab, blocks, asked)
            seeds = _seeds(offered, _numbers(asked.positions)) if asked.is_checked else None
            read = _Read(asked.secret, offered)
            match asked.path:
                case "shm":
                    self._show(asked.op, offered.slab, blocks)
                    if asked.is_checked:
                        self._hub.progress.work(_Summing(self, asked.op, offered.slab, pieces, seeds))
                case "tcp":
                    sender = self._hub.senders.get(self._agent or "")
                    if sender is None:
                        raise NotFound(
                            "there is no connection to send blocks over", kind="connection", name="tcp"
                        )
                    read.outgoing = Outgoing(
                        asked.op, offered.slab.memory, pieces, seeds, is_checked=asked.is_checked
                    )
                    if offered.slab.kind is MemoryKind.FILE:
                        read.outgoing.stage = partial(self._stage, asked.op, offered.slab)
                    sender.send(read.outgoing)
                case "nixl" if self._hub.nixl is not None:
                    self._over_nixl.add(asked.op)
                    self._hub.nixl.serve()
                    summing = _Summing(self, asked.op, offered.slab, pieces, seeds)
                    self._reads[asked.op] = read
                    self._hub.nixl.when_ready(lambda: self._show_nixl(asked, offered.slab, blocks, summing))
                    return
                case path:
                    raise Unsupported(f"this agent serves no path {path!r}", feature=path)
        except BaseException:
            self._hub.offers.end(asked.secret, is_whole=False)
            raise
        self._reads[asked.op] = read

    def _show(self, op: int, slab: Slab, blocks: Numbers) -> None:
        descriptor = slab.read_only() if slab.kind is MemoryKind.SHARED and self._link.is_unix else None
        if descriptor is None:
            raise Unsupported("this memory cannot be mapped by a peer", feature="shm")
        number = self._hub.number_of(slab)
        if number not in self._described:
            self._described.add(number)
            self._link.send(Described(slab.info(number), has_descriptor=True), descriptor)
        self._link.send(Ready(op, number, blocks.tobytes()))

    def _show_nixl(self, asked: Fetch, slab: Slab, blocks: Numbers, summing: _Summing) -> None:
        if asked.op not in self._reads or self._hub.nixl is None:
            return  # nobody waits for it any more
        number = self._hub.number_of(slab)
        try:
            told = self._hub.nixl.describe(slab, number)
        except KvoltError as error:
            self._fail(asked.op, error)
            return
        if self._nixl_slabs.get(number) != told:
            self._nixl_slabs[number] = told
            self._link.send(told)
        self._link.send(Ready(asked.op, number, blocks.tobytes()))
        if asked.is_checked:
            self._hub.progress.work(summing)

    def _stage(self, op: int, slab: Slab, pieces: Pieces) -> tuple[memoryview, Pieces] | None:
        """Blocks of a file, to be sent."""
        try:
            return self._staging.fill(slab, pieces)
        except KvoltError as error:
            self._fail(op, error)
            return None

    def _fail(self, op: int, error: KvoltError) -> None:
        self._end(op, is_whole=False)
        self._link.send(Failed(op, to_info(error)))

    def is_reading(self, op: int) -> bool:
        return op in self._reads

    def tell_sums(self, op: int, first: int, checksums: bytes) -> None:
        self._link.send(Sums(op, first, checksums))

    def _drop(self, op: int) -> _Read | None:
        read = self._reads.pop(op, None)
        if read is not None and read.outgoing is not None:
            read.outgoing.is_stopped = True
        return read

    def _end(self, op: int, is_whole: bool) -> None:
        read = self._drop(op)
        if read is not None:
            self._hub.offers.end(read.secret, is_whole)
        if op in self._over_nixl and self._hub.nixl is not None:
            self._over_nixl.discard(op)
            self._hub.nixl.serve_no_more()


class _Summing:
    """Work: the checksums of what a peer reads, told as they are known."""

    def __init__(self, served: Served, op: int, slab: Slab, pieces: Pieces, seeds: bytes | None) -> None:
        self._served = served
        self._op = op
        self._slab = slab
        self._pieces = pieces
        self._seeds = seeds
        self._first = 0

    def turn(self) -> bool:
        if not self._served.is_reading(self._op):
            return False
        first, pieces = self._first, self._pieces
        count = min(max(TURN_BYTES // pieces.bytes_per_block, 1), pieces.num_blocks - first)
        sums = sums_of(self._slab.memory, pieces.part(first, count), part_of(self._seeds, first, count))
        self._served.tell_sums(self._op, first, sums.tobytes())
        self._first += count
        return self._first < pieces.num_blocks


def sums_of(memory: memoryview, pieces: Pieces, seeds: bytes | None) -> Sums64:
    found = np.empty(pieces.num_blocks, dtype=np.uint64)
    block_bytes.checksums(memory, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds, found)
    return found


def part_of(seeds: bytes | None, first: int, count: int) -> bytes | None:
    return None if seeds is None else seeds[8 * first : 8 * (first + count)]


def _numbers(packed: bytes) -> Numbers:
    if len(packed) % 8:
        raise InvalidRequest("numbers have eight bytes each", param="positions")
    return np.frombuffer(packed, dtype="<i8")


def _seeds(offered: Offered, positions: Numbers) -> bytes | None:
    if offered.seeds is None or not len(positions):
        return offered.seeds
    chosen_seeds: bytes = np.frombuffer(offered.seeds, dtype="<u8")[positions].tobytes()
    return chosen_seeds


def _pieces(slab: Slab, blocks: Numbers, asked: Fetch) -> Pieces:
    if not asked.pieces:
        return slab.pieces(blocks)
    inside = _numbers(asked.pieces)
    size = asked.piece_bytes
    if size <= 0 or inside.min() < 0 or inside.max() + size > slab.block_bytes:
        raise InvalidRequest("pieces that lie outside of a block", param="pieces")
    return slab.pieces(blocks, inside, size)
