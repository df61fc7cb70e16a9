"""What a shared pool and its workers say to each other: one connection each over a Unix socket, msgpack in frames.

A worker asks, the pool answers by the question's number, in any order. Bytes of blocks go by tickets of the transfer
agents, never here. Only processes of the same user reach the socket: what they say is checked for form, not for truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import ErrorInfo, NetworkFault
from kvolt.core.ids import BlockKey, InstanceId, SequenceHash
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock

VERSION = 2
MOST_BLOCKS = 4096
"""In one question."""
_HEAD_BYTES = 4
_MOST_BYTES = 16 << 20
UNFINISHED_S = 60.0
"""For a frame to arrive whole."""


_Key = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Hash = Annotated[int, Meta(ge=0)]


class WireBlock(msgspec.Struct, frozen=True, array_like=True):
    """A `TierBlock`."""

    key: _Key
    sequence_hash: _Hash
    parent: _Key | None
    parent_hash: _Hash | None
    position: Annotated[int, Meta(ge=0, lt=1 << 32)]

    @classmethod
    def of(cls, block: TierBlock) -> WireBlock:
        return cls(block.key, block.sequence_hash, block.parent, block.parent_hash, block.position)

    def block(self) -> TierBlock:
        return TierBlock(
            BlockKey(self.key),
            SequenceHash(self.sequence_hash),
            None if self.parent is None else BlockKey(self.parent),
            None if self.parent_hash is None else SequenceHash(self.parent_hash),
            self.position,
        )


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """A ticket for some of a question's blocks: those at `places`, in that order."""

    ticket: bytes
    places: tuple[int, ...]


# --- questions


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    shape: BlockShape
    version: int = VERSION


class Look(msgspec.Struct, frozen=True, tag="look"):
    keys: tuple[bytes, ...]
    worth_s: float = 0.0
    """How long the pool may take to ask tiers of its own; none: it says what it knows."""


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    blocks: tuple[WireBlock, ...]
    checksums: tuple[int, ...]
    offered: tuple[Offered, ...]


class Bring(msgspec.Struct, frozen=True, tag="bring"):
    blocks: tuple[WireBlock, ...]
    shape: BlockShape | None = None
    """Of the blocks that are wanted, where that has not been said."""


class Suspect(msgspec.Struct, frozen=True, tag="suspect"):
    """They did not come as they should have: look at them."""

    keys: tuple[bytes, ...]


class Status(msgspec.Struct, frozen=True, tag="status"):
    pass


Question = Hello | Look | Keep | Bring | Suspect | Status

# --- answers


class Met(msgspec.Struct, frozen=True, tag="met"):
    """To a Hello."""

    pool: InstanceId | None = None
    """Under this name the pool tells routers of its blocks; None where it tells nobody."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class Found(msgspec.Struct, frozen=True, tag="found"):
    are_there: tuple[bool, ...]


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    num_new: int


class Brought(msgspec.Struct, frozen=True, tag="brought"):
    """Blocks from the first on; their bytes may be read until the offers end."""

    checksums: tuple[int, ...]
    offered: tuple[Offered, ...]


class TierSize(msgspec.Struct, frozen=True, array_like=True):
    tier: str
    num_blocks: int
    most_blocks: int | None
    block_bytes: int
    """Of one as it lies there."""


class PoolStatus(msgspec.Struct, frozen=True, tag="status"):
    shape: BlockShape | None
    """None before the first worker came."""
    num_workers: int
    tiers: tuple[TierSize, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    error: ErrorInfo


Answer = Met | Done | Found | Kept | Brought | PoolStatus | Refused


class Asked(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: Question


class Answered(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: Answer


def frame(message: Asked | Answered) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_HEAD_BYTES, "little") + data


async def read_frame(
    reader: asyncio.StreamReader, on_size: Callable[[int], object] = lambda num_bytes: None
) -> bytes:
    """NetworkFault when the other has gone, says what cannot be, or does not end what it began. `on_size` is given
    the size of a frame that begins to arrive."""
    try:
        size = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "little")
        if size > _MOST_BYTES:
            raise NetworkFault(f"a frame of {size:,} bytes is too large")
        on_size(size)
        async with asyncio.timeout(UNFINISHED_S):
            return await reader.readexactly(size)
    except TimeoutError:
        raise NetworkFault(f"a frame did not arrive whole within {UNFINISHED_S:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NetworkFault(f"the connection is lost ({type(error).__name__})") from None
