"""Offered: blocks that peers may read, by the secret of their ticket, until they are read or their time is over. Pure.

Owns who reads what. Blocks that are offered belong to who offered them, and stay as they are until the offer is over:
read whole once, taken back, or expired. An offer that is taken back while somebody reads is over when that one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, NotFound, Overloaded
from kvolt.transfer.memory.slabs import Numbers, Slab

MAX_OFFERS = 65_536


@dataclass(slots=True)
class Offered:
    """Blocks of a slab."""

    slab: Slab
    blocks: Numbers
    deadline: float
    on_over: Callable[[KvoltError | None], None]
    """Told once: None when they were read, else why not."""
    seeds: bytes | None = None
    """Of their checksums, 64 bits each."""
    num_readers: int = 0
    is_taken_back: bool = False
    was_read: bool = field(default=False)


class Offers:
    """See the module."""

    def __init__(self) -> None:
        self._by_secret: dict[int, Offered] = {}

    def __len__(self) -> int:
        return len(self._by_secret)

    def add(self, secret: int, offered: Offered) -> None:
        if len(self._by_secret) >= MAX_OFFERS:
            raise Overloaded(
                f"{MAX_OFFERS} offers of blocks wait to be read already", queue="offers", limit=MAX_OFFERS
            )
        self._by_secret[secret] = offered

    def begin(self, secret: int) -> Offered:
        """Somebody reads. NotFound for one that is over, taken back or never was: all the same to who asks."""
        offered = self._by_secret.get(secret)
        if offered is None or offered.is_taken_back:
            raise NotFound("these blocks are not offered any more", kind="ticket", name=f"{secret:016x}")
        offered.num_readers += 1
        return offered

    def end(self, secret: int, is_whole: bool) -> None:
        """Somebody reads no more. Not an error for what is over."""
        offered = self._by_secret.get(secret)
        if offered is None:
            return
        offered.num_readers -= 1
        offered.was_read |= is_whole
        if offered.num_readers == 0 and (offered.was_read or offered.is_taken_back):
            self._over(secret, None if offered.was_read else Cancelled("the offer was taken back"))

    def take_back(self, secret: int) -> None:
        """Nobody may begin any more. Not an error for what is over."""
        offered = self._by_secret.get(secret)
        if offered is None:
            return
        offered.is_taken_back = True
        if offered.num_readers == 0:
            self._over(secret, Cancelled("the offer was taken back"))

    def expire(self, secret: int) -> None:
        """Its time is over, whoever reads: those must be told."""
        if secret in self._by_secret:
            self._over(secret, DeadlineExceeded("nobody has read these blocks in time", stage="total"))

    def close(self) -> None:
        for secret in list(self._by_secret):
            self._over(secret, Cancelled("the agent was closed"))

    def _over(self, secret: int, error: KvoltError | None) -> None:
        self._by_secret.pop(secret).on_over(error)


def chosen(blocks: Numbers, positions: Numbers) -> Numbers:
    """Of an offer's blocks those at these positions; all where none are named. InvalidRequest for others, and for more
    than there are."""
    if not len(positions):
        return blocks
    if len(positions) > len(blocks):
        raise InvalidRequest(f"{len(blocks)} blocks are offered; asked for more", param="positions")
    if positions.min() < 0 or positions.max() >= len(blocks):
        raise InvalidRequest(f"{len(blocks)} blocks are offered; asked for others", param="positions")
    return blocks[positions]
