"""ReadOp: one read of a peer's blocks into local blocks, over any path.

Owns the destination side: request, destination and checksum comparison. Only this object writes to the destination
blocks, so a stopped read writes no more. With a Mover the read is done once the mover reports that it has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvolt.core.errors import KvoltError, ProtocolError, TransferFailed, from_info
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.device_memory import Memory, blocks_per_step
from kvolt.transfer.memory.layout import expand
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.memory.slabs import Numbers
from kvolt.transfer.reads.read_request import ReadRequest
from kvolt.transfer.reads.wire import CHUNK_BYTES, Checksums, Failed, Fetch

_STEP_BYTES = 8 << 20
"""Bytes copied per step, about a millisecond."""
COPY = "copy"
"""Path between two slabs of one process. Not checksummed, since no bytes leave the process."""
SHM = "shm"
TCP = "tcp"
NIXL = "nixl"
_WHOLE = np.zeros(1, dtype=np.int64)

OnDone = Callable[[KvoltError | None], None]


def _nothing() -> None: ...


class ReadSource(Protocol):
    """Where the blocks are read from."""

    def end_read(self, op: int, is_whole: bool) -> None:
        """The destination stops reading."""
        ...

    def forget_read(self, op: int) -> None:
        """The source has already ended the read."""
        ...


class Mover(Protocol):
    """Moves blocks on behalf of a ReadOp; reports `on_blocks_moved` and `on_mover_stopped`."""

    def stop(self) -> bool:
        """Stop moving. Return True if stopped, else `on_mover_stopped` follows."""
        ...


class ReadOp:
    """See the module. Progress thread only."""

    def __init__(self, request: ReadRequest, on_done: OnDone, is_last: bool = True) -> None:
        """`is_last`: completes the offer; False if the same blocks are read again for other pieces."""
        self.request = request
        self._is_last = is_last
        self.op = 0
        self.path = ""
        """Path in use; empty before the fetch was sent."""
        self.forced_path = ""
        """Path to use; empty: chosen by the link."""
        self.is_test = False
        """Self-test of a path; the bytes are discarded."""
        self.started_at = 0.0
        """Time the fetch was sent."""
        self.is_complete = False
        """Done, and all blocks arrived."""
        self._is_checked = request.is_checked
        self._on_done: OnDone | None = on_done
        self._source: ReadSource | None = None
        self._is_ready = False
        """The source has announced its blocks."""
        self._copy_source: tuple[Memory, Pieces] | None = None
        self._mover: Mover | None = None
        self._stop_error: KvoltError | None = None
        """Error to report once the mover has stopped."""
        self._before_done: Callable[[], None] = _nothing
        self._num_copied = 0
        self._num_checked = 0
        self._staging: memoryview | None = None
        """Receive buffer for chunks whose destination is a device."""
        self._received_sums = np.zeros(request.num_blocks, dtype=np.uint64)
        self._source_sums = np.zeros(request.num_blocks, dtype=np.uint64)

    @property
    def is_done(self) -> bool:
        return self._on_done is None

    def before_done(self, do: Callable[[], None]) -> None:
        """Run `do` on completion, before `on_done`."""
        self._before_done = do

    def start(self, source: ReadSource, op: int, path: str) -> Fetch:
        """Begin over `path`; return the Fetch message to send."""
        self._source, self.op, self.path = source, op, path
        self._is_ready, self._num_copied, self._num_checked = False, 0, 0
        self._is_checked = self.request.is_checked and path != COPY
        request = self.request
        return Fetch(
            op=op,
            secret=request.ticket.secret,
            path=path,
            positions=request.positions.tobytes(),
            pieces=b"" if request.inside is None else request.inside.tobytes(),
            piece_bytes=0 if request.inside is None else request.into.piece_bytes,
            is_checked=self._is_checked,
            proof=request.ticket.proof,
        )

    def stop(self, error: KvoltError) -> None:
        """Stop with an error; no byte is written once the read is done. No-op if done."""
        if self._mover is None or self._mover.stop():
            self._finish(error)
        elif self._stop_error is None:
            self._stop_error = error

    def expect_ready(self) -> None:
        """ProtocolError if the source already announced its blocks, or sends them over TCP."""
        if self._is_ready or self.path == TCP:
            raise ProtocolError("unexpected Ready message", rule="ready")

    def on_failed(self, message: Failed) -> None:
        """Handle the source's failure. A mover that may still need the source keeps it."""
        if self._source is not None and self._mover is None:
            self._source.forget_read(self.op)
            self._source = None
        self.stop(from_info(message.error))

    def _finish(self, error: KvoltError | None) -> None:
        if self._on_done is None:
            return
        on_done, self._on_done = self._on_done, None
        self.is_complete = error is None
        source, self._source, self._copy_source, self._mover = self._source, None, None, None
        self._staging = None
        try:
            if source is not None:
                source.end_read(self.op, is_whole=error is None and self._is_last)
        finally:  # even if `end_read` raises
            self._before_done()
            on_done(error)

    # --- from memory mapped into this process

    def start_copy(self, memory: Memory, numbers: Numbers, source_block_bytes: int) -> bool:
        """Copy the source's blocks in `step`s. Return False if their number does not match the request."""
        source = self.source_pieces(numbers, source_block_bytes)
        self._copy_source = None if source is None else (memory, source)
        return source is not None

    def source_pieces(self, numbers: Numbers, source_block_bytes: int) -> Pieces | None:
        """Pieces of the source's blocks. On a wrong number of blocks, stop and return None."""
        if len(numbers) != self.request.num_blocks:
            message = f"peer announced {len(numbers)} blocks for {self.request.num_blocks} requested"
            self.stop(ProtocolError(message, rule="ready"))
            return None
        self._is_ready = True
        inside, into = self.request.inside, self.request.into
        offsets = expand(numbers, source_block_bytes, _WHOLE if inside is None else inside)
        return Pieces(offsets, into.piece_bytes, into.per_block)

    def step(self) -> bool:
        """Work: copy some blocks."""
        if self._copy_source is None:
            return False
        memory, source = self._copy_source
        request, into, first = self.request, self.request.into, self._num_copied
        max_blocks = blocks_per_step(request.slab.contents, memory, into, _STEP_BYTES)
        count = min(max_blocks, into.num_blocks - first)
        destination, source = into.slice(first, count), source.slice(first, count)
        try:
            if self._is_checked:
                device_memory.copy_checked(
                    request.slab.contents,
                    destination,
                    memory,
                    source,
                    request.seeds_of(first, count),
                    self._received_sums[first : first + count],
                )
            else:
                device_memory.copy(request.slab.contents, destination, memory, source)
        except ValueError as error:  # block numbers out of range
            self.stop(ProtocolError(str(error), rule="ready"))
            return False
        except KvoltError as error:  # of a device
            self.stop(error)
            return False
        self._num_copied += count
        if self._num_copied < into.num_blocks:
            return True
        self._finish_if_complete()
        return False

    def on_sums(self, message: Checksums) -> None:
        """Store the source's checksums, which may arrive before or after the blocks."""
        sums = np.frombuffer(message.checksums, dtype="<u8")
        end = message.first + len(sums)
        is_expected = self._is_checked and self.path != TCP
        if not is_expected or message.first != self._num_checked or end > len(self._source_sums):
            self.stop(ProtocolError("unexpected checksums", rule="sums"))
            return
        self._source_sums[message.first : end] = sums
        self._num_checked = end
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        num_blocks, is_checked = self.request.num_blocks, self._is_checked
        if self._num_copied < num_blocks or (is_checked and self._num_checked < num_blocks):
            return
        if is_checked and not np.array_equal(self._received_sums, self._source_sums):
            self._fail_checksum(int(np.flatnonzero(self._received_sums != self._source_sums)[0]))
        else:
            self._finish(None)

    def _fail_checksum(self, position: int) -> None:
        message = f"checksum mismatch of block {position} over {self.path}"
        self.stop(TransferFailed(message, path=self.path, reason="checksum"))

    # --- through a mover

    def set_mover(self, mover: Mover) -> None:
        self._mover = mover

    def on_blocks_moved(self, count: int) -> None:
        """Count `count` more blocks in place."""
        first = self._num_copied
        self._num_copied += count
        if self._is_checked:
            self._compute_checksums(first, count)
        self._finish_if_complete()

    def on_mover_stopped(self, error: KvoltError | None) -> None:
        """The mover failed, or has stopped as requested."""
        self._mover = None
        self._finish(self._stop_error or error)

    # --- over TCP: a ChunkSink

    def destination(self, first: int, count: int) -> tuple[memoryview, Pieces] | None:
        if self.is_done:
            return None
        if self.path != TCP or first != self._num_copied or first + count > self.request.num_blocks:
            raise ProtocolError("unexpected chunk", rule="chunk")
        into, device = self.request.into.slice(first, count), self.request.slab.device
        if device is None:
            return self.request.slab.memory, into
        if count > max(CHUNK_BYTES // into.bytes_per_block, 1):
            raise ProtocolError(f"chunk of {count} blocks exceeds the chunk size", rule="chunk")
        num_bytes = count * into.bytes_per_block
        if self._staging is None or len(self._staging) < num_bytes:
            try:
                self._staging = device.staging(num_bytes)
            except KvoltError as error:
                self.stop(error)
                return None
        return self._staging, into.contiguous()

    def on_chunk(self, first: int, count: int, sums: Sums | None) -> None:
        if self.is_done:
            return
        request = self.request
        self._num_copied = first + count
        try:
            received = self._unstage(first, count)
        except ValueError as error:  # pieces the device cannot move
            self.stop(TransferFailed(f"cannot move blocks: {error}", path=TCP, reason="device"))
            return
        except KvoltError as error:
            self.stop(error)
            return
        if self._is_checked and (sums is None or not np.array_equal(received, sums)):
            self._fail_checksum(first if sums is None else first + int(np.flatnonzero(received != sums)[0]))
            return
        if self._num_copied == request.num_blocks:
            self._finish(None)

    def _unstage(self, first: int, count: int) -> Sums:
        """Move a staged chunk to its destination. Return the checksums, if requested."""
        device, received = self.request.slab.device, self._received_sums[first : first + count]
        if device is None:
            return self._compute_checksums(first, count) if self._is_checked else received
        assert self._staging is not None
        destination = self.request.into.slice(first, count)
        seeds = self.request.seeds_of(first, count)
        received[:] = device.move(device, destination, self._staging, destination.contiguous(), seeds)
        return received

    def _compute_checksums(self, first: int, count: int) -> Sums:
        """Compute the checksums of arrived blocks."""
        request, received = self.request, self._received_sums[first : first + count]
        destination = request.into.slice(first, count)
        device_memory.checksums(request.slab.contents, destination, request.seeds_of(first, count), received)
        return received
