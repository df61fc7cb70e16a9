"""Wire format between agents: framed messages and chunks of block bytes. Pure.

    frame    length (4, little-endian) | message (msgpack, tagged)
    chunk    op (8) | first (4) | count (4) | bytes per block (4) | is checked (4)
             | checksums (8 each, if checked) | block bytes

A connection carries frames or, after its Welcome, chunks. Agents that use TCP have one of each, so that messages do not
queue behind blocks. With credentials both are TLS. A chunk connection presents the key from the Welcome of its frame
connection, which prevents a third party from receiving the blocks. On a Unix socket the descriptor of a shared memory
accompanies its SharedSlab.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from kvolt.core.errors import MALFORMED, ErrorInfo, ProtocolError
from kvolt.transfer.memory.device_memory import DeviceHandle
from kvolt.transfer.memory.slabs import SlabInfo
from kvolt.transfer.paths.capabilities import PathCapabilities

VERSION = 5
MAX_FRAME_BYTES = 32 << 20
"""After the handshake."""
MAX_GREETING_BYTES = 4096
"""Before the handshake."""
MAX_BLOCKS = 3_000_000
"""Per transfer: their numbers and checksums fit into a frame."""
MAX_MESSAGE_BYTES = 1 << 20
"""Of a mailbox message."""
SECRET_BYTES = 16
"""Of an offer's ticket, random."""
Secret = Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)]
"""Names an offer: holders of its ticket may read it."""
Proof = Annotated[bytes, msgspec.Meta(max_length=64)]
CUDA_IPC = "cuda-ipc"
"""Path on which a device maps another process's memory."""
CHUNK = struct.Struct("<QIIII")
CHUNK_BYTES = 1 << 20
"""Bytes per chunk, or one block if it has more."""
_LENGTH = struct.Struct("<I")


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Network address of an agent."""

    agent: str
    """Random id, new at each start."""
    host: str
    port: int
    unix: str
    """Name of its abstract Unix socket, reachable from the same network namespace."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Capability to read blocks. Opaque outside agents."""

    address: Address
    secret: Secret
    slab: SlabInfo
    num_blocks: int
    proof: Proof = b""
    """`core.request.reader_proof` of the process that reads; empty if any process may."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    agent: str
    carries: Literal["frames", "chunks"]
    version: int = VERSION
    key: str = ""
    """For chunks: key of the frame connection."""


class Welcome(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    agent: str
    version: int = VERSION
    also_serves: tuple[str, ...] = ()
    """Optional paths that this agent serves."""
    key: str = ""
    """Key for the chunk connection of this connection. Single use."""
    capabilities: PathCapabilities | None = None
    """Capabilities of the agent, for route planning."""


class Fetch(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Request to read blocks of a ticket."""

    op: int
    secret: Secret
    path: str
    positions: bytes = b""
    """Among the ticket's blocks (packed int64); empty for all."""
    pieces: bytes = b""
    """Offsets inside a block (packed int64); empty for whole blocks."""
    piece_bytes: int = 0
    is_checked: bool = True
    proof: Proof = b""


class SharedSlab(msgspec.Struct, frozen=True, tag=True):
    """Shared-memory slab, sent before its first use, with its descriptor if the peer may map it."""

    slab: SlabInfo
    has_descriptor: bool


class NixlSlab(msgspec.Struct, frozen=True, tag=True):
    """NIXL registration of a slab, sent before its first use."""

    slab: SlabInfo
    address: int
    device: int
    metadata: bytes
    """Opaque NIXL metadata of the memory and its agent."""


class DeviceSlab(msgspec.Struct, frozen=True, tag=True):
    """CUDA IPC handle of a device slab, sent before its first use."""

    slab: SlabInfo
    handle: DeviceHandle


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Location of the requested blocks, stable during the read."""

    op: int
    slab: int
    blocks: bytes


class Checksums(msgspec.Struct, frozen=True, tag=True):
    """Checksums of requested blocks, from `first` on (packed uint64)."""

    op: int
    first: int
    checksums: bytes


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The reader is done; `is_whole`: it has all blocks."""

    op: int
    is_whole: bool


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The ticket will not be used."""

    secret: Secret
    proof: Proof = b""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The op failed."""

    op: int
    error: ErrorInfo


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Wait for the message of a mailbox. Ended cancels."""

    op: int
    mailbox: int
    timeout_s: float


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """The message of a mailbox, delivered to this waiter only."""

    op: int
    message: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]


Message = (
    Hello
    | Welcome
    | Fetch
    | SharedSlab
    | NixlSlab
    | DeviceSlab
    | Ready
    | Checksums
    | Ended
    | Declined
    | Failed
    | Receive
    | Delivered
)

_encoder = msgspec.msgpack.Encoder()
_decode_message = msgspec.msgpack.Decoder(Message).decode
_decode_ticket = msgspec.msgpack.Decoder(Ticket).decode


def to_frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into messages."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        """Frame size limit; may be changed between messages."""
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._buffer)

    def clear(self) -> None:
        """Free the buffer; `feed` must not be called again."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Must be exhausted before the next call. ProtocolError if malformed."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self.max_bytes:
                raise ProtocolError(f"frame of {length} bytes exceeds the limit", rule="frame_size")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            try:
                message = _decode_message(memoryview(buffer)[start + _LENGTH.size : end].tobytes())
            except MALFORMED as error:
                raise ProtocolError(f"malformed message: {error}", rule="message") from None
            yield message
            start = end
        del buffer[:start]


def encode_ticket(ticket: Ticket) -> bytes:
    return _encoder.encode(ticket)


def decode_ticket(data: bytes) -> Ticket:
    """ProtocolError if malformed."""
    try:
        return _decode_ticket(data)
    except MALFORMED as error:
        raise ProtocolError(f"malformed ticket: {error}", rule="ticket") from None


def bind_ticket(data: bytes, proof: bytes) -> bytes:
    """The ticket for the process of this proof. ProtocolError if malformed."""
    return encode_ticket(msgspec.structs.replace(decode_ticket(data), proof=proof)) if proof else data
