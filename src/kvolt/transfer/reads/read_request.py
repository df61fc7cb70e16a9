"""ReadRequest: validated source and destination of a read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvolt.core.errors import InvalidRequest
from kvolt.transfer.memory.layout import cut
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.reads.wire import Ticket

ALL = np.zeros(0, dtype=np.int64)
"""Positions: all blocks of the ticket."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Created by `new_read_request`."""

    ticket: Ticket
    positions: Numbers
    """Positions among the ticket's blocks; ALL for all."""
    slab: Slab
    into: Pieces
    inside: Numbers | None
    """Offsets of pieces in a source block; None for whole blocks."""
    seeds: bytes | None
    is_checked: bool

    @property
    def num_blocks(self) -> int:
        return self.into.num_blocks

    @property
    def num_bytes(self) -> int:
        return self.into.num_blocks * self.into.bytes_per_block

    def seeds_of(self, first: int, count: int) -> bytes | None:
        return None if self.seeds is None else self.seeds[8 * first : 8 * (first + count)]


def new_read_request(
    ticket: Ticket,
    slab: Slab,
    blocks: Numbers,
    positions: Numbers = ALL,
    seeds: bytes | None = None,
    is_checked: bool = True,
) -> ReadRequest:
    """Build a request that reads a ticket's blocks into local blocks, one each.

    InvalidRequest if counts or sizes differ, IncompatibleLayout if the KV layouts do.
    """
    num_blocks = len(positions) or ticket.num_blocks
    if num_blocks != len(blocks) or not num_blocks:
        raise InvalidRequest(
            f"{num_blocks} source blocks for {len(blocks)} destination blocks", param="blocks"
        )
    if seeds is not None and len(seeds) != 8 * num_blocks:
        raise InvalidRequest("seeds must have eight bytes per block", param="seeds")
    theirs, ours = ticket.slab.layout, slab.layout
    if theirs is None or ours is None:
        if ticket.slab.block_bytes != slab.block_bytes:
            raise InvalidRequest(
                f"source blocks have {ticket.slab.block_bytes} bytes, destination blocks {slab.block_bytes}",
                param="block_bytes",
            )
        return ReadRequest(ticket, positions, slab, slab.pieces(blocks), None, seeds, is_checked)
    pieces = cut(theirs, ours)
    if pieces is None:
        raise InvalidRequest(
            f"rank {theirs.tp_rank} of {theirs.tp_degree} has no head that rank {ours.tp_rank} of "
            f"{ours.tp_degree} needs",
            param="ticket",
        )
    if pieces.piece_bytes == slab.block_bytes == ticket.slab.block_bytes:
        return ReadRequest(ticket, positions, slab, slab.pieces(blocks), None, seeds, is_checked)
    into = slab.pieces(blocks, pieces.destination_offsets, pieces.piece_bytes)
    return ReadRequest(ticket, positions, slab, into, pieces.source_offsets, seeds, is_checked)
