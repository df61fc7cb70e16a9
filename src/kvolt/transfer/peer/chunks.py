"""Chunks: bytes of blocks over a TCP connection of their own, straight from one memory into the other.

A chunk is a few whole blocks with their checksums before them. So a block is checked as soon as it is there, while it
is still in the cache, and a transfer that is stopped stops at the end of a chunk: what is left of that one is zeros, as
its blocks may be somebody else's by then.
"""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import ProtocolError, WorkerLost
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.slabs import Pieces
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.wire import CHUNK

CHUNK_BYTES = 1 << 20
_MOST_BLOCKS = CHUNK_BYTES
"""In a chunk: they have a byte at least."""
_TURN_BYTES = 8 << 20
"""Moved before others have their turn."""
_SCRATCH_BYTES = 1 << 18

Sums = npt.NDArray[np.uint64]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Outgoing:
    """Blocks for a peer."""

    op: int
    memory: memoryview
    pieces: Pieces
    seeds: bytes | None
    is_checked: bool
    first: int = 0
    """Of the next chunk."""
    stage: Callable[[Pieces], tuple[memoryview, Pieces] | None] | None = None
    """Brings those of a chunk into memory, where they are not; None when they cannot be, and who waits was told."""


class ChunkSender:
    """See the module. In the progress thread only."""

    def __init__(self, progress: Progress, link: socket.socket, on_lost: Callable[[], None]) -> None:
        self._progress = progress
        self._socket = link
        self._on_lost = on_lost
        self._queue: OrderedDict[Outgoing, None] = OrderedDict()
        self._head = memoryview(b"")
        self._under_way: Outgoing | None = None
        """Whose chunk is being sent."""
        self._chunk: tuple[memoryview, Pieces] | None = None
        self._sent = 0
        """Of the chunk's blocks."""
        self.is_open = True
        progress.watch(link.fileno(), EVENT_READ, self._on_ready)

    def send(self, outgoing: Outgoing) -> None:
        if not self.is_open:
            raise WorkerLost("the connection for blocks is closed", reason="closed")
        self._queue[outgoing] = None
        self._progress.watch(self._socket.fileno(), EVENT_READ | EVENT_WRITE, self._on_ready)

    def drop(self, outgoing: Outgoing) -> None:
        """Nothing more of it leaves. Not an error for what has left, or was dropped."""
        self._queue.pop(outgoing, None)
        if self._under_way is outgoing and self._chunk is not None:
            _, pieces = self._chunk
            nowhere = np.zeros(len(pieces.offsets), dtype=np.int64)
            zeros = memoryview(bytes(pieces.piece_bytes))
            self._chunk = zeros, Pieces(nowhere, pieces.piece_bytes, pieces.per_block)
            self._under_way = None

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._progress.forget(self._socket.fileno())
            self._socket.close()
            self._queue.clear()
            self._chunk = self._under_way = None

    def _on_ready(self, events: int) -> None:
        try:
            if events & EVENT_READ and not self._socket.recv(1):
                raise ConnectionResetError("closed")
            if events & EVENT_WRITE:
                self._write()
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            # A slab that was closed too early, or a defect, is nobody's but this peer's loss.
            if not isinstance(error, OSError):
                log.warning("blocks cannot be sent to a peer", exc_info=True)
            self.close()
            self._on_lost()

    def _write(self) -> None:
        left = _TURN_BYTES
        while left > 0:
            if not len(self._head) and self._chunk is None and not self._next_chunk():
                if self.is_open:  # to say that blocks cannot be read may have ended it
                    self._progress.watch(self._socket.fileno(), EVENT_READ, self._on_ready)
                return
            if len(self._head):
                sent = self._socket.send(self._head, socket.MSG_NOSIGNAL | socket.MSG_MORE)
                self._head = self._head[sent:]
                continue
            assert self._chunk is not None
            memory, pieces = self._chunk
            size = pieces.num_blocks * pieces.bytes_per_block
            sent = block_bytes.send(
                self._socket.fileno(),
                memory,
                pieces.offsets,
                pieces.piece_bytes,
                self._sent,
                size - self._sent,
            )
            self._sent += sent
            left -= sent
            if self._sent == size:
                self._chunk = self._under_way = None

    def _next_chunk(self) -> bool:
        """Whether there is one."""
        while self._queue:
            out = next(iter(self._queue))
            if out.first >= out.pieces.num_blocks:
                del self._queue[out]
                continue
            count = min(max(CHUNK_BYTES // out.pieces.bytes_per_block, 1), out.pieces.num_blocks - out.first)
            memory, pieces = out.memory, out.pieces.part(out.first, count)
            if out.stage is not None:
                staged = out.stage(pieces)
                if staged is None:
                    self._queue.pop(out, None)
                    continue
                memory, pieces = staged
            head = CHUNK.pack(out.op, out.first, count, pieces.bytes_per_block, out.is_checked)
            if out.is_checked:
                sums = np.empty(count, dtype=np.uint64)
                seeds = None if out.seeds is None else out.seeds[8 * out.first : 8 * (out.first + count)]
                block_bytes.checksums(
                    memory, pieces.offsets, pieces.piece_bytes, pieces.per_block, seeds, sums
                )
                head += sums.tobytes()
            self._head, self._chunk, self._sent = memoryview(head), (memory, pieces), 0
            self._under_way = out
            out.first += count
            return True
        return False


class Incoming(Protocol):
    """Who takes the blocks of one op."""

    @property
    def is_over(self) -> bool:
        """Nobody wants them any more: not a byte is written where they were to go."""
        ...

    def place(self, first: int, count: int) -> tuple[memoryview, Pieces] | None:
        """Where these go; None when nobody wants them any more. ProtocolError for blocks that were not asked for."""
        ...

    def arrived(self, first: int, count: int, sums: Sums | None) -> None:
        """They lie where they were to go; with the checksums that they left with."""
        ...


class ChunkReceiver:
    """See the module. In the progress thread only."""

    def __init__(
        self,
        progress: Progress,
        link: socket.socket,
        who: Callable[[int], Incoming | None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """`who` takes the blocks of an op; nobody, where it was stopped: they are read and left."""
        self._progress = progress
        self._socket = link
        self._who = who
        self._on_lost = on_lost
        self._head = bytearray(CHUNK.size)
        self._num_head = 0
        self._op, self._first, self._count = 0, 0, 0
        self._sums: bytearray | None = None
        self._num_sums = 0
        self._received, self._size = 0, 0
        self._incoming: Incoming | None = None
        self._place: tuple[memoryview, Pieces] | None = None
        """Of the chunk that comes."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.is_open = True
        progress.watch(link.fileno(), EVENT_READ, self._on_ready)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._progress.forget(self._socket.fileno())
            self._socket.close()
            self._incoming = self._place = None

    def _on_ready(self, events: int) -> None:
        try:
            left = _TURN_BYTES
            while left > 0 and self.is_open:
                left -= self._read()
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            if not isinstance(error, OSError | ProtocolError):
                log.warning("blocks of a peer cannot be taken", exc_info=True)
            self.close()
            self._on_lost(error)

    def _read(self) -> int:
        """Some bytes; how many."""
        if self._num_head < CHUNK.size:
            return self._read_head()
        if self._sums is not None and self._num_sums < len(self._sums):
            got = self._into(memoryview(self._sums)[self._num_sums :])
            self._num_sums += got
            return got
        return self._read_blocks()

    def _into(self, target: memoryview) -> int:
        got = self._socket.recv_into(target)
        if not got:
            raise ConnectionResetError("a peer closed the connection for blocks")
        return got

    def _read_head(self) -> int:
        got = self._into(memoryview(self._head)[self._num_head :])
        self._num_head += got
        if self._num_head == CHUNK.size:
            self._op, self._first, self._count, size, is_checked = CHUNK.unpack(self._head)
            if not 0 < self._count <= _MOST_BLOCKS or not size:
                raise ProtocolError(f"a chunk of {self._count} blocks of {size} bytes", rule="chunk")
            self._sums = bytearray(8 * self._count) if is_checked else None
            self._num_sums, self._received = 0, 0
            self._size = self._count * size
            self._find_place()
        return got

    def _find_place(self) -> None:
        incoming = self._who(self._op)
        place = None if incoming is None else incoming.place(self._first, self._count)
        if place is not None and place[1].num_blocks * place[1].bytes_per_block != self._size:
            raise ProtocolError("blocks of another size than was asked for", rule="chunk")
        self._incoming, self._place = incoming, place

    def _read_blocks(self) -> int:
        incoming, place = self._incoming, self._place
        if incoming is None or place is None or incoming.is_over:
            got = self._into(self._scratch[: min(len(self._scratch), self._size - self._received)])
        else:
            memory, pieces = place
            got = block_bytes.receive(
                self._socket.fileno(),
                memory,
                pieces.offsets,
                pieces.piece_bytes,
                self._received,
                self._size - self._received,
            )
            if not got:
                raise ConnectionResetError("a peer closed the connection for blocks")
        self._received += got
        if self._received == self._size:
            self._num_head = 0
            self._incoming = self._place = None
            if incoming is not None:
                sums = None if self._sums is None else np.frombuffer(self._sums, dtype=np.uint64)
                incoming.arrived(self._first, self._count, sums)
        return got
