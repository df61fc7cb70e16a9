"""CheckedFetch: a peer's Fetch validated against the offer. Pure.

All numbers in a Fetch are untrusted: none may address memory outside the offer or cause large allocations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.peer.offers import Offer, select_blocks
from kvolt.transfer.peer.wire import Fetch

MAX_PIECES = 1 << 24
"""Concurrent pieces of one peer; eight bytes are kept for each."""


@dataclass(frozen=True, slots=True)
class CheckedFetch:
    """Created by `check_fetch`."""

    blocks: Numbers
    pieces: Pieces
    """Location of the requested pieces in the slab."""
    seeds: bytes | None


def check_fetch(offer: Offer, fetch: Fetch, max_pieces: int) -> CheckedFetch:
    """InvalidRequest if outside the offer, Overloaded if larger than `max_pieces`."""
    positions = unpack_numbers(fetch.positions)
    blocks = select_blocks(offer.blocks, positions)
    piece_offsets = _piece_offsets(offer.slab, fetch)
    per_block = 1 if piece_offsets is None else len(piece_offsets)
    if len(blocks) * per_block > max_pieces:
        raise Overloaded(
            f"too many concurrent pieces of one peer: limit is {MAX_PIECES}", queue="pieces", limit=MAX_PIECES
        )
    seeds = offer.seeds if fetch.is_checked else None
    if seeds is not None and len(positions):
        seeds = np.frombuffer(seeds, dtype="<u8")[positions].tobytes()
    return CheckedFetch(blocks, offer.slab.pieces(blocks, piece_offsets, fetch.piece_bytes), seeds)


def unpack_numbers(packed: bytes) -> Numbers:
    """Decode packed int64. InvalidRequest if malformed."""
    if len(packed) % 8:
        raise InvalidRequest("packed numbers must have eight bytes each", param="positions")
    return np.frombuffer(packed, dtype="<i8")


def _piece_offsets(slab: Slab, fetch: Fetch) -> Numbers | None:
    """Offsets of the requested pieces in a block; None for whole blocks."""
    if not fetch.pieces:
        return None
    piece_offsets, size = unpack_numbers(fetch.pieces), fetch.piece_bytes
    if (
        not 0 < size <= slab.block_bytes
        or piece_offsets.min() < 0
        or piece_offsets.max() > slab.block_bytes - size
    ):
        raise InvalidRequest("pieces lie outside the block", param="pieces")
    if len(piece_offsets) * size > slab.block_bytes:
        raise InvalidRequest("pieces exceed the block", param="pieces")
    return piece_offsets
