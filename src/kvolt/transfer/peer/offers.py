"""Offers: blocks that peers may read, keyed by the secret of their ticket. Pure.

The owner must not change offered blocks until the offer is done: read completely once, withdrawn or expired. An offer
withdrawn during a read is done when that read ends.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, NotFound, Overloaded
from kvolt.core.request import reader_proof
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.reads.wire import Fetch

MAX_OFFERS = 65_536
MAX_PIECES = 1 << 24
"""Concurrent pieces of one peer; eight bytes are kept for each."""


@dataclass(slots=True)
class Offer:
    """Blocks of one slab offered for reading."""

    slab: Slab
    blocks: Numbers
    deadline: float
    on_done: Callable[[KvoltError | None], None]
    """Called once: None after a complete read, else the error."""
    seeds: bytes | None = None
    """Checksum seeds, 64 bits per block."""
    reader_key: bytes = b""
    """Only peers with a proof of this key may read; empty: all with the ticket."""
    num_readers: int = 0
    is_withdrawn: bool = False
    was_read: bool = field(default=False)

    def before_done(self, do: Callable[[], None]) -> None:
        """Run `do` on completion, before `on_done`."""
        on_done = self.on_done

        def run(error: KvoltError | None) -> None:
            do()
            on_done(error)

        self.on_done = run


class Offers:
    """All offers of an agent."""

    def __init__(self, on_refused: Callable[[str], None] = lambda reader: None) -> None:
        """`on_refused`: called with the identity of a peer that presents a ticket made for another."""
        self._by_secret: dict[bytes, Offer] = {}
        self._on_refused = on_refused

    def __len__(self) -> int:
        return len(self._by_secret)

    def add(self, secret: bytes, offer: Offer) -> None:
        if len(self._by_secret) >= MAX_OFFERS:
            raise Overloaded(f"too many open offers: limit is {MAX_OFFERS}", queue="offers", limit=MAX_OFFERS)
        self._by_secret[secret] = offer

    def begin_read(self, secret: bytes, proof: bytes = b"", reader: str | None = None) -> Offer:
        """Register a reader. `reader`: identity of a peer with a certificate, which needs the proof for it.

        NotFound for an unknown, finished or withdrawn offer and for one of another reader, indistinguishable to the
        peer.
        """
        offer = self._by_secret.get(secret)
        if offer is None or offer.is_withdrawn or not self._may_read(offer, proof, reader):
            raise NotFound("the offer does not exist or has ended", kind="ticket", name=secret.hex())
        offer.num_readers += 1
        return offer

    def decline(self, secret: bytes, proof: bytes, reader: str | None) -> None:
        """As `withdraw`, for a peer that could have read the offer."""
        offer = self._by_secret.get(secret)
        if offer is not None and self._may_read(offer, proof, reader):
            self.withdraw(secret)

    def _may_read(self, offer: Offer, proof: bytes, reader: str | None) -> bool:
        """Without a certificate the ticket is enough: the peer is of this user, or the network is trusted."""
        if reader is None or not offer.reader_key:
            return True
        if hmac.compare_digest(proof, reader_proof(offer.reader_key, reader)):
            return True
        self._on_refused(reader)
        return False

    def end_read(self, secret: bytes, is_whole: bool) -> None:
        """Unregister a reader. No-op if the offer is done."""
        offer = self._by_secret.get(secret)
        if offer is None:
            return
        offer.num_readers -= 1
        offer.was_read |= is_whole
        if offer.num_readers == 0 and (offer.was_read or offer.is_withdrawn):
            self._finish(secret, None if offer.was_read else Cancelled("the offer was withdrawn"))

    def withdraw(self, secret: bytes) -> None:
        """Reject new readers; done once current readers end. No-op if the offer is done."""
        offer = self._by_secret.get(secret)
        if offer is None:
            return
        offer.is_withdrawn = True
        if offer.num_readers == 0:
            self._finish(secret, Cancelled("the offer was withdrawn"))

    def expire(self, secret: bytes) -> None:
        """Finish at the deadline. The caller stops current readers."""
        if secret in self._by_secret:
            self._finish(
                secret,
                DeadlineExceeded("the offered blocks were not read before the deadline", stage="total"),
            )

    def close(self) -> None:
        for secret in list(self._by_secret):
            self._finish(secret, Cancelled("the agent was closed"))

    def _finish(self, secret: bytes, error: KvoltError | None) -> None:
        self._by_secret.pop(secret).on_done(error)


def select_blocks(blocks: Numbers, positions: Numbers) -> Numbers:
    """Blocks at these positions of an offer; all if `positions` is empty. InvalidRequest if out of range."""
    if not len(positions):
        return blocks
    if len(positions) > len(blocks):
        raise InvalidRequest(f"more positions than the {len(blocks)} offered blocks", param="positions")
    if positions.min() < 0 or positions.max() >= len(blocks):
        raise InvalidRequest(f"positions outside the {len(blocks)} offered blocks", param="positions")
    return blocks[positions]


@dataclass(frozen=True, slots=True)
class CheckedFetch:
    """A peer's Fetch validated against the offer. Created by `check_fetch`.

    All numbers in a Fetch are untrusted: none may address memory outside the offer or cause large allocations.
    """

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
