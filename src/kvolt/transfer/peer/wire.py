"""What two agents say to each other: messages in frames, and the bytes of blocks between them. Pure.

    frame    length (4, little-endian) | a message (msgpack, tagged)
    chunk    op (8) | first (4) | count (4) | bytes of a block (4) | whether checked (4)
             | checksums (8 each, where asked for) | the blocks' bytes

A connection carries frames, or, from its Welcome on, chunks: one of each kind for a pair of agents that talk over TCP,
so that no word waits behind a block. The one for chunks is opened with the key that came with the Welcome of the other,
so that nobody has blocks sent to himself in another's name. Over a Unix socket the descriptor of a shared memory comes
with its Described.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from kvolt.core.errors import ErrorInfo, ProtocolError
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.slabs import SlabInfo
from kvolt.transfer.paths.capabilities import Capabilities

VERSION = 2
MAX_FRAME_BYTES = 32 << 20
"""Of one who was let in."""
MAX_GREETING_BYTES = 4096
"""Of one who was not yet."""
MAX_BLOCKS = 3_000_000
"""In one transfer: their numbers, and their checksums, fit into a frame."""
MAX_NOTE_BYTES = 1 << 20
"""Of a room."""
CUDA_IPC = "cuda-ipc"
"""The path by which a device reads another process's memory itself."""
CHUNK = struct.Struct("<QIIII")
_LENGTH = struct.Struct("<I")


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where an agent is reached."""

    agent: str
    """Another one with every start."""
    host: str
    port: int
    unix: str
    """The name of its abstract socket: whoever shares a network namespace with it reaches it there."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """For blocks that may be read, or written to, by who has it. Opaque to all but agents."""

    address: Address
    secret: int
    slab: SlabInfo
    num_blocks: int
    is_for: Literal["read", "write"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    agent: str
    carries: Literal["frames", "chunks"]
    version: int = VERSION
    key: str = ""
    """Of the connection for frames that these chunks belong to."""


class Welcome(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    agent: str
    version: int = VERSION
    also_serves: tuple[str, ...] = ()
    """Paths beside those that everybody has."""
    key: str = ""
    """What the connection for chunks that belongs to this one must present. Good for one."""
    can: Capabilities | None = None
    """What the agent can do, for whoever plans a route from it."""


class Fetch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """I would like to have these."""

    op: int
    secret: int
    path: str
    positions: bytes = b""
    """Among the ticket's blocks (int64, packed); none for all of them."""
    pieces: bytes = b""
    """Offsets inside a block (int64, packed); none for whole blocks."""
    piece_bytes: int = 0
    is_checked: bool = True


class Described(msgspec.Struct, frozen=True, tag=True):
    """Of a slab, before anything of it. With its descriptor, where this is a Unix socket and others may map it."""

    slab: SlabInfo
    has_descriptor: bool


class NixlSlab(msgspec.Struct, frozen=True, tag=True):
    """Of a slab, before anything of it over NIXL."""

    slab: SlabInfo
    address: int
    device: int
    metadata: bytes
    """Opaque: what NIXL must know of the memory, and of whose it is."""


class DeviceSlab(msgspec.Struct, frozen=True, tag=True):
    """Of a slab on a device, before anything of it by CUDA IPC."""

    slab: SlabInfo
    handle: DeviceHandle


class Ready(msgspec.Struct, frozen=True, tag=True):
    """They are in this slab under these numbers, and stay while you read."""

    op: int
    slab: int
    blocks: bytes


class Sums(msgspec.Struct, frozen=True, tag=True):
    """Their checksums, from the `first` on (uint64, packed)."""

    op: int
    first: int
    checksums: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """I read no more of it; whether I have it all."""

    op: int
    is_whole: bool


class Declined(msgspec.Struct, frozen=True, tag=True):
    """Nobody will read what this ticket is for."""

    secret: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more comes of it."""

    op: int
    error: ErrorInfo


class Offer(msgspec.Struct, frozen=True, tag=True):
    """For your writable blocks at these positions there is something to be read."""

    op: int
    secret: int
    positions: bytes
    ticket: Ticket
    is_checked: bool = True


class Taken(msgspec.Struct, frozen=True, tag=True):
    """Of an Offer: it is read, or will not be."""

    op: int
    error: ErrorInfo | None = None


class Meet(msgspec.Struct, frozen=True, tag=True):
    """I wait for this room's note, so long. An Ended says that I wait no more."""

    op: int
    room: int
    timeout_s: float


class Met(msgspec.Struct, frozen=True, tag=True):
    """It is this. Nobody else gets it."""

    op: int
    note: Annotated[bytes, msgspec.Meta(max_length=MAX_NOTE_BYTES)]


Message = (
    Hello
    | Welcome
    | Fetch
    | Described
    | NixlSlab
    | DeviceSlab
    | Ready
    | Sums
    | Ended
    | Declined
    | Failed
    | Offer
    | Taken
    | Meet
    | Met
)

_encoder = msgspec.msgpack.Encoder()
_decode_message = msgspec.msgpack.Decoder(Message).decode
_decode_ticket = msgspec.msgpack.Decoder(Ticket).decode


def to_frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages out."""

    def __init__(self, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self.most_bytes = most_bytes
        """Of a frame; may be changed between two messages."""
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Of a frame that has not come whole."""
        return len(self._buffer)

    def clear(self) -> None:
        """Free what is buffered; nothing may be fed after it."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """To be taken to the end, or not used again. ProtocolError for what is none."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.most_bytes:
                raise ProtocolError(f"a frame of {length} bytes", rule="frame_size")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                message = _decode_message(memoryview(buffer)[start + _LENGTH.size : end].tobytes())
            except MALFORMED as error:
                raise ProtocolError(f"a message that cannot be read: {error}", rule="message") from None
            yield message
            start = end
        del buffer[:start]


def ticket_bytes(ticket: Ticket) -> bytes:
    return _encoder.encode(ticket)


def read_ticket(data: bytes) -> Ticket:
    """ProtocolError for what is none."""
    try:
        return _decode_ticket(data)
    except MALFORMED as error:
        raise ProtocolError(f"a ticket that cannot be read: {error}", rule="ticket") from None
