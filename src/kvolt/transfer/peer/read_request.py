"""Wanted: what a read is to bring and where to, worked out before anything is asked of a peer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvolt.core.errors import InvalidRequest
from kvolt.transfer.memory.layout import cut
from kvolt.transfer.memory.slabs import Numbers, Pieces, Slab
from kvolt.transfer.peer.wire import Ticket

ALL = np.zeros(0, dtype=np.int64)
"""Positions: no choice among a ticket's blocks."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """See the module; `new_wanted` makes one."""

    ticket: Ticket
    positions: Numbers
    """Among the ticket's blocks; ALL for all."""
    slab: Slab
    into: Pieces
    inside: Numbers | None
    """Offsets in a block of the source; None for whole ones."""
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


def new_wanted(
    ticket: Ticket,
    slab: Slab,
    blocks: Numbers,
    positions: Numbers = ALL,
    seeds: bytes | None = None,
    is_checked: bool = True,
) -> Wanted:
    """A ticket's blocks into blocks of ours, one each.

    InvalidRequest where their numbers or sizes do not fit, IncompatibleLayout where they do not mean the same.
    """
    num_blocks = len(positions) or ticket.num_blocks
    if num_blocks != len(blocks) or not num_blocks:
        raise InvalidRequest(f"{num_blocks} blocks for {len(blocks)} of ours", param="blocks")
    if seeds is not None and len(seeds) != 8 * num_blocks:
        raise InvalidRequest("a seed has eight bytes, and every block has one", param="seeds")
    theirs, ours = ticket.slab.layout, slab.layout
    if theirs is None or ours is None:
        if ticket.slab.block_bytes != slab.block_bytes:
            raise InvalidRequest(
                f"blocks of {ticket.slab.block_bytes} bytes for blocks of {slab.block_bytes}",
                param="block_bytes",
            )
        return Wanted(ticket, positions, slab, slab.pieces(blocks), None, seeds, is_checked)
    found = cut(theirs, ours)
    if found is None:
        raise InvalidRequest(
            f"rank {theirs.tp_rank} of {theirs.tp_degree} has no head that rank {ours.tp_rank} of "
            f"{ours.tp_degree} needs",
            param="ticket",
        )
    if found.piece_bytes == slab.block_bytes == ticket.slab.block_bytes:
        return Wanted(ticket, positions, slab, slab.pieces(blocks), None, seeds, is_checked)
    into = slab.pieces(blocks, found.destination_offsets, found.piece_bytes)
    return Wanted(ticket, positions, slab, into, found.source_offsets, seeds, is_checked)
