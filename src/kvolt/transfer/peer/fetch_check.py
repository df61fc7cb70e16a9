"""Fetched: what a peer asks for, held against what it was offered, before anything is done for it. Pure.

All numbers of a Fetch are the peer's: none of them may lead outside of what is offered, or make us take more memory
than that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.transfer.memory.slabs import Numbers, Pieces, Slab
from kvolt.transfer.peer.offers import Offered, chosen
from kvolt.transfer.peer.wire import Fetch

MAX_PIECES = 1 << 24
"""That one peer reads at a time: eight bytes each are kept."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """See the module; `fetched` makes one."""

    blocks: Numbers
    pieces: Pieces
    """Of the slab: where what is asked for lies."""
    seeds: bytes | None


def fetched(offered: Offered, asked: Fetch, room: int) -> Fetched:
    """`room`: for so many pieces. InvalidRequest for what was not offered, Overloaded for too much at a time."""
    positions = numbers_of(asked.positions)
    blocks = chosen(offered.blocks, positions)
    inside = _inside(offered.slab, asked)
    per_block = 1 if inside is None else len(inside)
    if len(blocks) * per_block > room:
        raise Overloaded(
            f"a peer reads {MAX_PIECES} pieces at a time at most", queue="pieces", limit=MAX_PIECES
        )
    seeds = offered.seeds if asked.is_checked else None
    if seeds is not None and len(positions):
        seeds = np.frombuffer(seeds, dtype="<u8")[positions].tobytes()
    return Fetched(blocks, offered.slab.pieces(blocks, inside, asked.piece_bytes), seeds)


def numbers_of(packed: bytes) -> Numbers:
    """InvalidRequest for what is none."""
    if len(packed) % 8:
        raise InvalidRequest("numbers have eight bytes each", param="positions")
    return np.frombuffer(packed, dtype="<i8")


def _inside(slab: Slab, asked: Fetch) -> Numbers | None:
    """Offsets of the pieces of a block; None where it is whole."""
    if not asked.pieces:
        return None
    inside, size = numbers_of(asked.pieces), asked.piece_bytes
    if not 0 < size <= slab.block_bytes or inside.min() < 0 or inside.max() > slab.block_bytes - size:
        raise InvalidRequest("pieces that lie outside of a block", param="pieces")
    if len(inside) * size > slab.block_bytes:
        raise InvalidRequest("pieces that are more than a block", param="pieces")
    return inside
