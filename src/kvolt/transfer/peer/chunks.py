"""Chunks: block bytes over a dedicated connection, from memory to memory; over plain TCP without intermediate copies.

A chunk is a few whole blocks preceded by their checksums, so that a block is verified on arrival, while in cache. A
stopped transfer fills the rest of its current chunk with zeros, since its blocks may already be reused.
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

from kvolt.core.errors import ProtocolError, WorkerLost
from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.peer.streams import stream_of
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.wire import CHUNK, CHUNK_BYTES

_MAX_CHUNK_BLOCKS = CHUNK_BYTES
"""Blocks per chunk: a block has at least one byte."""
_STEP_BYTES = 8 << 20
"""Bytes per step."""
_SCRATCH_BYTES = 1 << 18
_UNEXPECTED_BYTES = 4096
"""Read at once from a peer that should send nothing."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OutgoingBlocks:
    """Blocks to be sent to a peer."""

    op: int
    memory: memoryview
    pieces: Pieces
    seeds: bytes | None
    is_checked: bool
    first: int = 0
    """First block of the next chunk."""
    stage: Callable[[Pieces], tuple[memoryview, Pieces] | None] | None = None
    """Copies the blocks of a chunk into host memory if needed; returns None on failure, which it reports."""


class ChunkSender:
    """See the module. Progress thread only."""

    def __init__(self, progress: ProgressThread, sock: socket.socket, on_lost: Callable[[], None]) -> None:
        self._progress = progress
        self._stream = stream_of(sock)
        self._on_lost = on_lost
        self._queue: OrderedDict[OutgoingBlocks, None] = OrderedDict()
        self._head = memoryview(b"")
        self._sending: OutgoingBlocks | None = None
        """Owner of the current chunk."""
        self._chunk: tuple[memoryview, Pieces] | None = None
        self._sent = 0
        """Bytes sent of the current chunk."""
        self.is_open = True
        progress.watch(sock.fileno(), EVENT_READ, self._on_ready)

    def send(self, outgoing: OutgoingBlocks) -> None:
        if not self.is_open:
            raise WorkerLost("the chunk connection is closed", reason="closed")
        self._queue[outgoing] = None
        self._watch(EVENT_READ | EVENT_WRITE)

    def drop(self, outgoing: OutgoingBlocks) -> None:
        """Stop sending. No-op if sent or dropped."""
        self._queue.pop(outgoing, None)
        if self._sending is outgoing and self._chunk is not None:
            _, pieces = self._chunk
            nowhere = np.zeros(len(pieces.offsets), dtype=np.int64)
            zeros = memoryview(bytes(pieces.piece_bytes))
            self._chunk = zeros, Pieces(nowhere, pieces.piece_bytes, pieces.per_block)
            self._sending = None

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._progress.unwatch(self._stream.sock.fileno())
            self._stream.sock.close()
            self._queue.clear()
            self._chunk = self._sending = None

    def _on_ready(self, events: int) -> None:
        try:
            if events & EVENT_READ and not self._stream.receive(_UNEXPECTED_BYTES):
                raise ConnectionResetError("closed")
            if events & EVENT_WRITE:
                self._write()
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            # A closed slab or a defect affects this peer only.
            if not isinstance(error, OSError):
                log.warning("sending chunks failed", exc_info=True)
            self.close()
            self._on_lost()

    def _write(self) -> None:
        left = min(_STEP_BYTES, self._stream.step_bytes)
        while left > 0:
            if not len(self._head) and self._chunk is None and not self._next_chunk():
                if self.is_open:  # staging errors may have closed it
                    self._stream.flush()
                    self._watch(EVENT_READ)
                return
            if len(self._head):
                sent = self._stream.send(self._head, has_more=True)
                self._head = self._head[sent:]
                continue
            assert self._chunk is not None
            memory, pieces = self._chunk
            size = pieces.num_blocks * pieces.bytes_per_block
            sent = self._stream.send_pieces(memory, pieces, self._sent)
            self._sent += sent
            left -= sent
            if self._sent == size:
                self._chunk = self._sending = None

    def _watch(self, events: int) -> None:
        self._progress.watch(self._stream.sock.fileno(), events, self._on_ready)

    def _next_chunk(self) -> bool:
        """Prepare the next chunk; return whether there is one."""
        while self._queue:
            out = next(iter(self._queue))
            if out.first >= out.pieces.num_blocks:
                del self._queue[out]
                continue
            count = min(max(CHUNK_BYTES // out.pieces.bytes_per_block, 1), out.pieces.num_blocks - out.first)
            memory, pieces = out.memory, out.pieces.slice(out.first, count)
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
            self._sending = out
            out.first += count
            return True
        return False


class ChunkSink(Protocol):
    """Receives the blocks of one op."""

    @property
    def is_done(self) -> bool:
        """Cancelled: nothing more is written to its destination."""
        ...

    def destination(self, first: int, count: int) -> tuple[memoryview, Pieces] | None:
        """Memory for these blocks; None if cancelled. ProtocolError for unrequested blocks."""
        ...

    def on_chunk(self, first: int, count: int, sums: Sums | None) -> None:
        """The blocks are in place; `sums`: checksums from the sender."""
        ...


class ChunkReceiver:
    """See the module. Progress thread only."""

    def __init__(
        self,
        progress: ProgressThread,
        sock: socket.socket,
        find_sink: Callable[[int], ChunkSink | None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """`find_sink` returns the sink of an op; None: discard its blocks."""
        self._progress = progress
        self._stream = stream_of(sock)
        self._find_sink = find_sink
        self._on_lost = on_lost
        self._head = bytearray(CHUNK.size)
        self._num_head = 0
        self._op, self._first, self._count = 0, 0, 0
        self._sums: bytearray | None = None
        self._num_sums = 0
        self._received, self._size = 0, 0
        self._sink: ChunkSink | None = None
        self._destination: tuple[memoryview, Pieces] | None = None
        """Of the current chunk."""
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self.is_open = True
        progress.watch(sock.fileno(), EVENT_READ, self._on_ready)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._progress.unwatch(self._stream.sock.fileno())
            self._stream.sock.close()
            self._sink = self._destination = None

    def _on_ready(self, events: int) -> None:
        try:
            left = min(_STEP_BYTES, self._stream.step_bytes)
            while (left > 0 or self._stream.is_pending) and self.is_open:
                left -= self._read()
        except (BlockingIOError, InterruptedError):
            return
        except Exception as error:
            if not isinstance(error, OSError | ProtocolError):
                log.warning("receiving chunks failed", exc_info=True)
            self.close()
            self._on_lost(error)

    def _read(self) -> int:
        """Receive some bytes; return the count."""
        if self._num_head < CHUNK.size:
            return self._read_head()
        if self._sums is not None and self._num_sums < len(self._sums):
            num_bytes = self._receive_into(memoryview(self._sums)[self._num_sums :])
            self._num_sums += num_bytes
            return num_bytes
        return self._read_blocks()

    def _receive_into(self, target: memoryview) -> int:
        num_bytes = self._stream.receive_into(target)
        if not num_bytes:
            raise ConnectionResetError("the peer closed the chunk connection")
        return num_bytes

    def _read_head(self) -> int:
        num_bytes = self._receive_into(memoryview(self._head)[self._num_head :])
        self._num_head += num_bytes
        if self._num_head == CHUNK.size:
            self._op, self._first, self._count, size, is_checked = CHUNK.unpack(self._head)
            if not 0 < self._count <= _MAX_CHUNK_BLOCKS or not size:
                raise ProtocolError(f"a chunk of {self._count} blocks of {size} bytes", rule="chunk")
            self._sums = bytearray(8 * self._count) if is_checked else None
            self._num_sums, self._received = 0, 0
            self._size = self._count * size
            self._find_destination()
        return num_bytes

    def _find_destination(self) -> None:
        sink = self._find_sink(self._op)
        destination = None if sink is None else sink.destination(self._first, self._count)
        if (
            destination is not None
            and destination[1].num_blocks * destination[1].bytes_per_block != self._size
        ):
            raise ProtocolError("chunk size differs from the requested blocks", rule="chunk")
        self._sink, self._destination = sink, destination

    def _read_blocks(self) -> int:
        sink, destination = self._sink, self._destination
        if sink is None or destination is None or sink.is_done:
            num_bytes = self._receive_into(
                self._scratch[: min(len(self._scratch), self._size - self._received)]
            )
        else:
            memory, pieces = destination
            num_bytes = self._stream.receive_pieces(memory, pieces, self._received)
            if not num_bytes:
                raise ConnectionResetError("the peer closed the chunk connection")
        self._received += num_bytes
        if self._received == self._size:
            self._num_head = 0
            self._sink = self._destination = None
            if sink is not None:
                sums = None if self._sums is None else np.frombuffer(self._sums, dtype=np.uint64)
                sink.on_chunk(self._first, self._count, sums)
        return num_bytes
