"""Byte streams of a connection: a plain non-blocking socket, or TLS over one. They move pieces of blocks and messages.

Over a plain socket the kernel gathers pieces from memory and scatters them. TLS encrypts from memory and decrypts into
it; pieces smaller than a TLS record are gathered first, or each would be a record.
"""

from __future__ import annotations

import socket
import ssl
from typing import Protocol

import numpy as np

from kvolt.transfer.memory import block_bytes
from kvolt.transfer.memory.pieces import Pieces

_RECORD_BYTES = 16 << 10
"""Plain bytes of a full TLS record. Only a read of at least this size leaves none in the SSL object."""
_UNIT_BYTES = 256 << 10
"""Bytes given to TLS at a time; the last are copied when the socket is full."""


class Stream(Protocol):
    """Progress thread only. A call that can neither send nor receive now raises BlockingIOError, a broken connection
    another OSError. Reading returns no bytes once the peer has closed."""

    sock: socket.socket
    step_bytes: int
    """Block bytes to move before other connections get their turn."""

    @property
    def is_pending(self) -> bool:
        """Whether received bytes are buffered here, for which the selector does not fire."""
        ...

    def receive(self, max_bytes: int) -> bytes:
        """Leaves nothing pending."""
        ...

    def receive_into(self, target: memoryview) -> int: ...

    def receive_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int:
        """Receive into the concatenated pieces from byte `start` on; return the number of bytes."""
        ...

    def send(self, data: memoryview, has_more: bool = False) -> int:
        """Return the number of accepted bytes. `has_more`: more follows at once."""
        ...

    def send_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int: ...

    def flush(self) -> None:
        """Send accepted bytes that are buffered here. BlockingIOError if some are left: wait until writable."""
        ...


def stream_of(sock: socket.socket) -> Stream:
    """The stream of a connected socket; of an `ssl.SSLSocket` after its handshake."""
    return TlsStream(sock) if isinstance(sock, ssl.SSLSocket) else PlainStream(sock)


class PlainStream:
    """Stream over a socket."""

    step_bytes = 8 << 20
    is_pending = False

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def receive(self, max_bytes: int) -> bytes:
        return self.sock.recv(max_bytes)

    def receive_into(self, target: memoryview) -> int:
        return self.sock.recv_into(target)

    def receive_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int:
        size = len(pieces.offsets) * pieces.piece_bytes
        return block_bytes.receive(
            self.sock.fileno(), memory, pieces.offsets, pieces.piece_bytes, start, size - start
        )

    def send(self, data: memoryview, has_more: bool = False) -> int:
        return self.sock.send(data, socket.MSG_NOSIGNAL | (socket.MSG_MORE if has_more else 0))

    def send_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int:
        size = len(pieces.offsets) * pieces.piece_bytes
        return block_bytes.send(
            self.sock.fileno(), memory, pieces.offsets, pieces.piece_bytes, start, size - start
        )

    def flush(self) -> None: ...


class TlsStream:
    """Stream over TLS.

    OpenSSL wants a write that did not fit to be repeated with the same bytes. Blocks may change by then, so those bytes
    are kept here and count as accepted.
    """

    step_bytes = 1 << 20

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock: socket.socket = sock
        self._tls = sock
        self._unsent = b""
        """Bytes of a write to repeat."""
        self._scratch = memoryview(b"")

    @property
    def is_pending(self) -> bool:
        return self._tls.pending() > 0

    def receive(self, max_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < max_bytes:
            try:
                received = self._tls.recv(_RECORD_BYTES)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLWantWriteError:
                raise _unexpected_update() from None
            if not received:
                return bytes(data)  # closed: the next call returns nothing
            data += received
        if not data:
            raise BlockingIOError
        return bytes(data)

    def receive_into(self, target: memoryview) -> int:
        try:
            return self._tls.recv_into(target)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise _unexpected_update() from None

    def receive_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int:
        if pieces.piece_bytes >= _RECORD_BYTES:
            return self._receive_piece(_rest_of_piece(memory, pieces, start)[: self.step_bytes])
        left = len(pieces.offsets) * pieces.piece_bytes - start
        scratch = self._scratch_of(_RECORD_BYTES)[: min(left, _RECORD_BYTES)]
        num_bytes = self.receive_into(scratch)
        _scatter(scratch[:num_bytes], memory, pieces, start)
        return num_bytes

    def _receive_piece(self, target: memoryview) -> int:
        """Receive until the target is full or no more has come. A call of OpenSSL returns at most one record."""
        num_bytes = 0
        while num_bytes < len(target):
            try:
                received = self.receive_into(target[num_bytes:])
            except BlockingIOError:
                if not num_bytes:
                    raise
                break
            if not received:
                break
            num_bytes += received
        return num_bytes

    def send(self, data: memoryview, has_more: bool = False) -> int:
        self.flush()
        data = data[:_UNIT_BYTES]
        try:
            return self._tls.send(data)
        except ssl.SSLWantWriteError:
            self._unsent = bytes(data)
            return len(data)
        except ssl.SSLWantReadError:
            raise _unexpected_update() from None

    def send_pieces(self, memory: memoryview, pieces: Pieces, start: int) -> int:
        if pieces.piece_bytes >= _RECORD_BYTES:
            return self.send(_rest_of_piece(memory, pieces, start))
        self.flush()  # before gathering in vain
        first, skipped = divmod(start, pieces.piece_bytes)
        offsets = pieces.offsets[first : first + max(_UNIT_BYTES // pieces.piece_bytes, 1)]
        gathered = self._scratch_of(_UNIT_BYTES)[: len(offsets) * pieces.piece_bytes]
        packed = np.arange(len(offsets), dtype=np.int64) * pieces.piece_bytes
        block_bytes.copy(gathered, packed, memory, offsets, pieces.piece_bytes)
        return self.send(gathered[skipped:])

    def flush(self) -> None:
        if not self._unsent:
            return
        try:
            self._tls.send(self._unsent)
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLWantReadError:
            raise _unexpected_update() from None
        self._unsent = b""

    def _scratch_of(self, num_bytes: int) -> memoryview:
        if len(self._scratch) < num_bytes:
            self._scratch = memoryview(bytearray(num_bytes))
        return self._scratch


def _rest_of_piece(memory: memoryview, pieces: Pieces, start: int) -> memoryview:
    """The piece that contains byte `start` of the concatenated pieces, from there on."""
    index, skipped = divmod(start, pieces.piece_bytes)
    at = int(pieces.offsets[index])
    if not 0 <= at <= len(memory) - pieces.piece_bytes:
        raise ValueError(f"a piece at offset {at} lies outside of {len(memory)} bytes")
    return memory[at + skipped : at + pieces.piece_bytes]


def _scatter(data: memoryview, memory: memoryview, pieces: Pieces, start: int) -> None:
    """Copy bytes to the concatenated pieces from byte `start` on."""
    done = 0
    while done < len(data):
        index, skipped = divmod(start + done, pieces.piece_bytes)
        num_whole = 0 if skipped else (len(data) - done) // pieces.piece_bytes
        if num_whole:
            offsets = pieces.offsets[index : index + num_whole]
            packed = done + np.arange(num_whole, dtype=np.int64) * pieces.piece_bytes
            block_bytes.copy(memory, offsets, data, packed, pieces.piece_bytes)
            done += num_whole * pieces.piece_bytes
        else:
            rest = _rest_of_piece(memory, pieces, start + done)[: len(data) - done]
            rest[:] = data[done : done + len(rest)]
            done += len(rest)


def _unexpected_update() -> OSError:
    """TLS 1.3 sends against the direction of a call for key updates only, which kvolt does not request."""
    return ConnectionError("unexpected TLS message")
