"""Wire format between a shared pool and its workers: msgpack frames over a Unix socket.

The pool responds to numbered requests in any order. Block bytes are transferred by tickets of transfer agents, not on
this connection. Only processes of the same user can connect, so messages are validated syntactically only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvolt.core.errors import ErrorInfo, NetworkFault
from kvolt.core.ids import InstanceId
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock

VERSION = 3
MAX_BLOCKS = 4096
"""Blocks per request."""
_HEAD_BYTES = 4
_MAX_FRAME_BYTES = 16 << 20
UNFINISHED_S = 60.0
"""Deadline for a started frame."""


class OfferedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Ticket for the blocks of a request at the indexes `places`, in that order."""

    ticket: bytes
    places: tuple[int, ...]


# --- requests


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    shape: BlockShape
    version: int = VERSION


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    keys: tuple[bytes, ...]
    worth_s: float = 0.0
    """Time limit for queries of the pool's lower tiers; 0: known blocks only."""


class StoreBlocks(msgspec.Struct, frozen=True, tag="store"):
    blocks: tuple[TierBlock, ...]
    checksums: tuple[int, ...]
    offered: tuple[OfferedBlocks, ...]


class FetchBlocks(msgspec.Struct, frozen=True, tag="fetch"):
    blocks: tuple[TierBlock, ...]
    shape: BlockShape | None = None
    """Expected block shape, on connections without Hello."""


class VerifyBlocks(msgspec.Struct, frozen=True, tag="verify"):
    """Request to verify blocks that failed their checksum at the worker."""

    keys: tuple[bytes, ...]


class Status(msgspec.Struct, frozen=True, tag="status"):
    pass


PoolRequest = Hello | Lookup | StoreBlocks | FetchBlocks | VerifyBlocks | Status

# --- responses


class HelloResult(msgspec.Struct, frozen=True, tag="hello"):
    """Response to Hello."""

    pool: InstanceId | None = None
    """Instance id under which the pool publishes its blocks; None: not published."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    pass


class LookupResult(msgspec.Struct, frozen=True, tag="lookup"):
    exist: tuple[bool, ...]


class StoreResult(msgspec.Struct, frozen=True, tag="store"):
    num_new: int


class FetchResult(msgspec.Struct, frozen=True, tag="fetch"):
    """Prefix of the requested blocks; their bytes can be read until the offers end."""

    checksums: tuple[int, ...]
    offered: tuple[OfferedBlocks, ...]


class TierSize(msgspec.Struct, frozen=True, array_like=True):
    tier: str
    num_blocks: int
    max_blocks: int | None
    block_bytes: int
    """Stored size of one block."""


class PoolStatus(msgspec.Struct, frozen=True, tag="status"):
    shape: BlockShape | None
    """None before the first worker connected."""
    num_workers: int
    tiers: tuple[TierSize, ...]


class ErrorResponse(msgspec.Struct, frozen=True, tag="error"):
    error: ErrorInfo


PoolResponse = HelloResult | Done | LookupResult | StoreResult | FetchResult | PoolStatus | ErrorResponse


class RequestFrame(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: PoolRequest


class ResponseFrame(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: PoolResponse


def frame(message: RequestFrame | ResponseFrame) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_HEAD_BYTES, "little") + data


async def read_frame(
    reader: asyncio.StreamReader, on_size: Callable[[int], object] = lambda num_bytes: None
) -> bytes:
    """Read a frame. NetworkFault if the connection is lost, the frame is too large or incomplete at the deadline.

    `on_size` is called with the size of a frame once it is known.
    """
    try:
        size = int.from_bytes(await reader.readexactly(_HEAD_BYTES), "little")
        if size > _MAX_FRAME_BYTES:
            raise NetworkFault(f"frame of {size:,} bytes exceeds the limit")
        on_size(size)
        async with asyncio.timeout(UNFINISHED_S):
            return await reader.readexactly(size)
    except TimeoutError:
        raise NetworkFault(f"incomplete frame after {UNFINISHED_S:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NetworkFault(f"connection lost ({type(error).__name__})") from None
