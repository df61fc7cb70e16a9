"""Framing of the request plane, sans-I/O.

Every frame is a 9-byte header and a payload:

    0        4      5          9
    +--------+------+----------+---------------------+
    | length | kind | stream   | payload (length B)  |     little-endian u32, u8, u32
    +--------+------+----------+---------------------+

Frames that carry data of many streams (DELTAS, STEP, ITEMS, ENDS, CREDIT) use stream 0. The header and the HELLO
and REFUSE payloads never change, so that any two versions can at least refuse each other. Malformed bytes raise
ProtocolError; at most one frame is buffered.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import ErrorInfo, ProtocolError, VersionMismatch, from_info

VERSIONS = (2,)
"""Protocol versions that this build speaks, best first."""

CHUNK_BYTES = 64 * 1024
"""Largest payload between two deltas; longer messages are sent in chunks."""

MAX_OPEN_BYTES = CHUNK_BYTES + 16 * 1024
"""Limit of an OPEN with inline body; target and context are short."""

MIN_FRAME_LIMIT_BYTES = 2 * CHUNK_BYTES
"""Smallest frame limit that a peer may announce: a chunk with its envelope."""

MAX_HELLO_BYTES = 16 * 1024
"""Limit of a peer's first frame."""

HEADER = Struct("<IBI")
NIL = b"\xc0"


class FrameKind(IntEnum):
    HELLO = 1
    REFUSE = 2
    OPEN = 3
    DELTAS = 4
    ITEMS = 5
    CHUNK = 6
    ENDS = 7
    CANCEL = 8
    CREDIT = 9
    PING = 10
    GOAWAY = 11
    STEP = 12


MAX_STREAM_ID = 2**32 - 1

Frame = tuple[int, int, bytes]
"""Kind, stream, payload."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """First frame in both directions. A map: later versions may add keys."""

    versions: tuple[int, ...]
    process: str
    """Random id of the sending process."""
    address: str | None = None
    """Where the sender listens, so that the peer can use this connection for calls to it."""
    max_frame_bytes: int
    max_message_bytes: int
    heartbeat_s: float
    software: str = ""


class Open(msgspec.Struct, frozen=True, array_like=True):
    """Opens a stream. A chunked body follows in CHUNK frames; `body` is nil then."""

    target: str
    window: int
    deadline_s: float | None
    context: dict[str, str]
    chunked: bool
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode

decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_open = msgspec.msgpack.Decoder(Open).decode
decode_delta = msgspec.msgpack.Decoder(Delta).decode
decode_deltas = msgspec.msgpack.Decoder(list[tuple[int, Delta]]).decode
decode_items = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]]).decode
decode_ends = msgspec.msgpack.Decoder(list[tuple[int, ErrorInfo | None]]).decode
decode_credit = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
decode_error = msgspec.msgpack.Decoder(ErrorInfo).decode

_KINDS = frozenset(FrameKind)


def frame(kind: FrameKind, stream: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind, stream) + payload


class FrameDecoder:
    """Splits a byte stream into frames. After an error it stays broken, because the frame boundary is lost."""

    __slots__ = ("_broken", "_limit_bytes", "_max_frame_bytes", "_needed", "_rest")

    def __init__(self, max_frame_bytes: int, max_first_bytes: int | None = None) -> None:
        """`max_first_bytes`: separate limit for the first frame."""
        self._max_frame_bytes = max_frame_bytes
        self._limit_bytes = max_frame_bytes if max_first_bytes is None else max_first_bytes
        self._rest = bytearray()
        """Bytes of the incomplete frame."""
        self._needed = HEADER.size
        """Length that `_rest` must reach before it is parsed again."""
        self._broken: ProtocolError | None = None

    @property
    def buffered_bytes(self) -> int:
        return len(self._rest)

    def clear(self) -> None:
        """Free the buffer of a closed connection."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`, in order."""
        if self._broken is not None:
            raise self._broken
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        position, end = 0, len(data)
        header_size = HEADER.size
        self._needed = header_size
        while end - position >= header_size:
            length, kind, stream = HEADER.unpack_from(data, position)
            if length > self._limit_bytes:
                raise self._break("frame_size", f"a frame of {length} bytes is over {self._limit_bytes}")
            if kind not in _KINDS:
                raise self._break("frame_kind", f"frame kind {kind} is unknown")
            body = position + header_size
            if body + length > end:
                self._needed = header_size + length
                break
            position = body + length
            self._limit_bytes = self._max_frame_bytes
            frames.append((kind, stream, data[body:position]))
        if position < end:
            self._rest += data[position:]
        return frames

    def _break(self, rule: str, text: str) -> ProtocolError:
        self._rest.clear()
        self._broken = ProtocolError(text, rule=rule)
        return self._broken


def negotiate(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    """The highest common version, or None."""
    return max((version for version in ours if version in theirs), default=None)


def check_hello(hello: Hello, ours: tuple[int, ...]) -> int:
    """The version to speak with a peer. Raises ProtocolError if there is none."""
    version = negotiate(ours, hello.versions)
    if version is None:
        raise VersionMismatch(
            f"no common protocol version: one side speaks {list(ours)}, the other {list(hello.versions)}; "
            "upgrade the older one",
            ours=str(list(ours)),
            theirs=str(list(hello.versions)),
        )
    if hello.max_frame_bytes < MIN_FRAME_LIMIT_BYTES:
        raise ProtocolError("the peer's frame limit is below the chunk size", rule="hello")
    return version


def decode_refusal(payload: bytes) -> ProtocolError:
    error = from_info(decode_error(payload))
    return error if isinstance(error, ProtocolError) else ProtocolError(error.message, rule="refused")
