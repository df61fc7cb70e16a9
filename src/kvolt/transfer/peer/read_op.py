"""Reading: blocks of a peer come into ours. One `Reading` for each read, whatever the way.

Owns the destination's half: what is asked for, where it goes, and whether what came is what left. Nobody but this
writes to the blocks, so a read that is stopped has stopped. Where a Mover writes to them, it is over when that one says
that it does so no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvolt.core.errors import KvoltError, ProtocolError, TransferFailed, from_info
from kvolt.transfer.memory import device_memory
from kvolt.transfer.memory.device_memory import Memory, blocks_at_once
from kvolt.transfer.memory.layout import expand
from kvolt.transfer.memory.slabs import Numbers, Pieces
from kvolt.transfer.paths.file_path import FILE
from kvolt.transfer.peer.chunks import CHUNK_BYTES, Sums
from kvolt.transfer.peer.read_request import Wanted
from kvolt.transfer.peer.wire import Failed, Fetch
from kvolt.transfer.peer.wire import Sums as SumsMessage

_TURN_BYTES = 8 << 20
"""Copied before others have their turn: a millisecond or so."""
OWN = "copy"
"""The path from one slab of a process to another: nothing leaves it, so nothing is checked."""
SHM = "shm"
TCP = "tcp"
_WHOLE = np.zeros(1, dtype=np.int64)

OnOver = Callable[[KvoltError | None], None]


def _nothing() -> None: ...


class Source(Protocol):
    """Whoever the blocks are read from."""

    def ended(self, op: int, is_whole: bool) -> None:
        """We read no more of it."""
        ...

    def forget(self, op: int) -> None:
        """By its own word nothing more comes of it."""
        ...


class Mover(Protocol):
    """Who moves the blocks where they are not copied here: it tells `landed`, and `let_go`."""

    def stop(self) -> bool:
        """Nobody wants them any more. Whether it writes no more; else it will let go."""
        ...


class Reading:
    """See the module. In the progress thread only."""

    def __init__(self, wanted: Wanted, on_over: OnOver, is_last: bool = True) -> None:
        """`is_last`: of the ticket; another one would want other pieces of the same blocks."""
        self.wanted = wanted
        self._is_last = is_last
        self.op = 0
        self.path = ""
        """How they come; empty while nothing was asked for."""
        self.only_path = ""
        """The path that they are to come by; empty where that is the link's to say."""
        self.is_test = False
        """Of a path: nobody wants the bytes."""
        self.began_at = 0.0
        """When they were asked for."""
        self.is_complete = False
        """It is over, and all blocks came."""
        self._is_checked = wanted.is_checked
        self._on_over: OnOver | None = on_over
        self._source: Source | None = None
        self._is_ready = False
        """The source has said where the blocks lie there."""
        self._from: tuple[Memory, Pieces] | None = None
        self._mover: Mover | None = None
        self._stopped_with: KvoltError | None = None
        """Why, while the mover has not let go."""
        self._then: Callable[[], None] = _nothing
        self._num_copied = 0
        self._num_checked = 0
        self._staging: memoryview | None = None
        """Where a chunk is received that goes to a device."""
        self._came = np.zeros(wanted.num_blocks, dtype=np.uint64)
        self._left = np.zeros(wanted.num_blocks, dtype=np.uint64)

    @property
    def is_over(self) -> bool:
        return self._on_over is None

    def then(self, do: Callable[[], None]) -> None:
        """When it is over, before that is told."""
        self._then = do

    def begin(self, source: Source, op: int, path: str) -> Fetch:
        """It can be asked: what is to be asked for."""
        self._source, self.op, self.path = source, op, path
        self._is_ready, self._num_copied, self._num_checked = False, 0, 0
        self._is_checked = self.wanted.is_checked and path not in (OWN, FILE)
        wanted = self.wanted
        return Fetch(
            op=op,
            secret=wanted.ticket.secret,
            path=path,
            positions=wanted.positions.tobytes(),
            pieces=b"" if wanted.inside is None else wanted.inside.tobytes(),
            piece_bytes=0 if wanted.inside is None else wanted.into.piece_bytes,
            is_checked=self._is_checked,
        )

    def stop(self, error: KvoltError) -> None:
        """It failed, or nobody wants it: when it is over no byte is written any more. Nothing for one that is."""
        if self._mover is None or self._mover.stop():
            self._end(error)
        elif self._stopped_with is None:
            self._stopped_with = error

    def expect_ready(self) -> None:
        """ProtocolError where the source has said already where its blocks lie, or they are sent."""
        if self._is_ready or self.path == TCP:
            raise ProtocolError("blocks are ready that were so already, or are sent", rule="ready")

    def on_failed(self, message: Failed) -> None:
        """By the source's word. It waits for our own where a mover may still need it."""
        if self._source is not None and self._mover is None:
            self._source.forget(self.op)
            self._source = None
        self.stop(from_info(message.error))

    def _end(self, error: KvoltError | None) -> None:
        if self._on_over is None:
            return
        on_over, self._on_over = self._on_over, None
        self.is_complete = error is None
        source, self._source, self._from, self._mover = self._source, None, None, None
        self._staging = None
        try:
            if source is not None:
                source.ended(self.op, is_whole=error is None and self._is_last)
        finally:  # whatever is wrong with what is learned from it: who waits is told
            self._then()
            on_over(error)

    # --- from memory that is mapped here

    def copy_from(self, memory: Memory, numbers: Numbers, block_bytes_there: int) -> bool:
        """The blocks lie there under these numbers: `turn` copies them. Whether they are as many as are wanted."""
        there = self.pieces_there(numbers, block_bytes_there)
        self._from = None if there is None else (memory, there)
        return there is not None

    def pieces_there(self, numbers: Numbers, block_bytes_there: int) -> Pieces | None:
        """Where blocks lie that have these numbers there. None where it is stopped: they are not as many as wanted."""
        if len(numbers) != self.wanted.num_blocks:
            told = f"{len(numbers)} blocks came for {self.wanted.num_blocks}"
            self.stop(ProtocolError(told, rule="ready"))
            return None
        self._is_ready = True
        inside, into = self.wanted.inside, self.wanted.into
        offsets = expand(numbers, block_bytes_there, _WHOLE if inside is None else inside)
        return Pieces(offsets, into.piece_bytes, into.per_block)

    def turn(self) -> bool:
        """Work: a part of the copying."""
        if self._from is None:
            return False
        memory, source = self._from
        wanted, into, first = self.wanted, self.wanted.into, self._num_copied
        most = blocks_at_once(wanted.slab.contents, memory, into, _TURN_BYTES)
        count = min(most, into.num_blocks - first)
        here, there = into.part(first, count), source.part(first, count)
        try:
            if self._is_checked:
                device_memory.copy_checked(
                    wanted.slab.contents,
                    here,
                    memory,
                    there,
                    wanted.seeds_of(first, count),
                    self._came[first : first + count],
                )
            else:
                device_memory.copy(wanted.slab.contents, here, memory, there)
        except ValueError as error:  # the source named blocks that there are not
            self.stop(ProtocolError(str(error), rule="ready"))
            return False
        except KvoltError as error:  # of a device
            self.stop(error)
            return False
        self._num_copied += count
        if self._num_copied < into.num_blocks:
            return True
        self._end_if_all()
        return False

    def on_sums(self, message: SumsMessage) -> None:
        """Those that the blocks left with; they may come before the blocks, or after them."""
        sums = np.frombuffer(message.checksums, dtype="<u8")
        end = message.first + len(sums)
        is_asked_for = self._is_checked and self.path != TCP
        if not is_asked_for or message.first != self._num_checked or end > len(self._left):
            self.stop(ProtocolError("checksums of other blocks", rule="sums"))
            return
        self._left[message.first : end] = sums
        self._num_checked = end
        self._end_if_all()

    def _end_if_all(self) -> None:
        num_blocks, is_checked = self.wanted.num_blocks, self._is_checked
        if self._num_copied < num_blocks or (is_checked and self._num_checked < num_blocks):
            return
        if is_checked and not np.array_equal(self._came, self._left):
            self._wrong(int(np.flatnonzero(self._came != self._left)[0]))
        else:
            self._end(None)

    def _wrong(self, position: int) -> None:
        told = f"block {position} came over {self.path} with another checksum than it left with"
        self.stop(TransferFailed(told, path=self.path, reason="checksum"))

    # --- by a mover

    def moved_by(self, mover: Mover) -> None:
        self._mover = mover

    def landed(self, count: int) -> None:
        """So many more blocks lie where they were to go."""
        first = self._num_copied
        self._num_copied += count
        if self._is_checked:
            self._sum_up(first, count)
        self._end_if_all()

    def let_go(self, error: KvoltError | None) -> None:
        """The mover writes no more: it failed, or was stopped."""
        self._mover = None
        self._end(self._stopped_with or error)

    # --- over TCP: an Incoming

    def place(self, first: int, count: int) -> tuple[memoryview, Pieces] | None:
        if self.is_over:
            return None
        if self.path != TCP or first != self._num_copied or first + count > self.wanted.num_blocks:
            raise ProtocolError("a chunk of other blocks", rule="chunk")
        into, device = self.wanted.into.part(first, count), self.wanted.slab.device
        if device is None:
            return self.wanted.slab.memory, into
        if count > max(CHUNK_BYTES // into.bytes_per_block, 1):
            raise ProtocolError(f"a chunk of {count} blocks, which is more than a chunk", rule="chunk")
        num_bytes = count * into.bytes_per_block
        if self._staging is None or len(self._staging) < num_bytes:
            try:
                self._staging = device.staging(num_bytes)
            except KvoltError as error:
                self.stop(error)
                return None
        return self._staging, into.in_row()

    def arrived(self, first: int, count: int, sums: Sums | None) -> None:
        if self.is_over:
            return
        wanted = self.wanted
        self._num_copied = first + count
        try:
            came = self._settled(first, count)
        except ValueError as error:  # of a device: pieces that it cannot move
            self.stop(TransferFailed(f"blocks cannot be moved: {error}", path=TCP, reason="device"))
            return
        except KvoltError as error:
            self.stop(error)
            return
        if self._is_checked and (sums is None or not np.array_equal(came, sums)):
            self._wrong(first if sums is None else first + int(np.flatnonzero(came != sums)[0]))
            return
        if self._num_copied == wanted.num_blocks:
            self._end(None)

    def _settled(self, first: int, count: int) -> Sums:
        """What has come is where it was to go; its checksums, where they are asked for."""
        device, came = self.wanted.slab.device, self._came[first : first + count]
        if device is None:
            return self._sum_up(first, count) if self._is_checked else came
        assert self._staging is not None
        here = self.wanted.into.part(first, count)
        seeds = self.wanted.seeds_of(first, count)
        came[:] = device.move(device, here, self._staging, here.in_row(), seeds)
        return came

    def _sum_up(self, first: int, count: int) -> Sums:
        """The checksums of what has come."""
        wanted, came = self.wanted, self._came[first : first + count]
        here = wanted.into.part(first, count)
        device_memory.checksums(wanted.slab.contents, here, wanted.seeds_of(first, count), came)
        return came
