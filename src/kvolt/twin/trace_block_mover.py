"""KV between workers of a twin: blocks have no bytes there, only a size, and take time on the links of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count

from kvolt.core.errors import DeadlineExceeded, NotFound, TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.engines.sim.transfers import SimTransfers


class PaperOffer:
    """A KvOffer."""

    def __init__(self, board: PaperBoard, number: int, worker: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._board = board
        self._over: asyncio.Future[None] = loop.create_future()
        self.number = number
        self.worker = worker
        self._expiry = loop.call_later(timeout_s, self.end)

    @property
    def ticket(self) -> bytes:
        return str(self.number).encode()

    def cancel(self) -> None:
        self.end()

    def end(self) -> None:
        self._expiry.cancel()
        self._board.forget(self.number)
        if not self._over.done():
            self._over.set_result(None)

    def over(self) -> Awaitable[object]:
        return asyncio.shield(self._over)


class PaperBoard:
    """What the workers of one twin offer each other."""

    def __init__(self, transfers: SimTransfers, racks: Mapping[str, str]) -> None:
        """`racks`: of each worker, the name of its rack."""
        self.transfers = transfers
        self._racks = racks
        self._offers: dict[int, PaperOffer] = {}
        self._rooms: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self.num_bytes = 0
        """That have been moved."""

    def offer(self, worker: str, timeout_s: float) -> PaperOffer:
        number = next(self._numbers)
        offer = self._offers[number] = PaperOffer(self, number, worker, timeout_s)
        return offer

    def find(self, ticket: bytes) -> PaperOffer:
        offer = self._offers.get(int(ticket))
        if offer is None:
            raise NotFound("these blocks are not offered any more", kind="ticket", name=ticket.decode())
        return offer

    def path(self, source: str, target: str) -> list[str]:
        """The links between two workers."""
        racks = self._racks.get(source), self._racks.get(target)
        between = (
            []
            if racks[0] == racks[1]
            else [link(rack) for rack, link in zip(racks, _ENDS, strict=True) if rack]
        )
        return [link_out(source), *between, link_in(target)]

    def forget(self, number: int) -> None:
        self._offers.pop(number, None)

    def room(self, number: int) -> asyncio.Future[bytes]:
        """Whoever comes first opens it."""
        if number not in self._rooms:
            self._rooms[number] = asyncio.get_running_loop().create_future()
        return self._rooms[number]

    def leave(self, number: int) -> None:
        self._rooms.pop(number, None)

    def close(self) -> None:
        self.transfers.close()
        for offer in list(self._offers.values()):
            offer.end()


class PaperPost:
    """A KvPost."""

    def __init__(self, board: PaperBoard, room: int, note: bytes, timeout_s: float) -> None:
        self._board = board
        self._room = room
        self._note = board.room(room)
        self._note.set_result(note)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry = asyncio.get_running_loop().call_later(timeout_s, self.cancel)

    def cancel(self) -> None:
        self._expiry.cancel()
        self._board.leave(self._room)
        if not self._over.done():
            self._over.set_result(None)

    def over(self) -> Awaitable[object]:
        return asyncio.shield(self._over)


class PaperMover:
    """A KvMover for one worker."""

    def __init__(self, board: PaperBoard, worker: str, block_bytes: int) -> None:
        self._board = board
        self._worker = worker
        self._block_bytes = block_bytes

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def offer(self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float) -> PaperOffer:
        return self._board.offer(self._worker, timeout_s)

    async def pull(
        self, ticket: bytes, first: int, keys: Sequence[BlockKey], into: Sequence[int], timeout_s: float
    ) -> str:
        offer = self._board.find(ticket)
        num_bytes = len(into) * self._block_bytes
        try:
            async with asyncio.timeout(timeout_s):
                path = self._board.path(offer.worker, self._worker)
                has_come = await self._board.transfers.move(num_bytes, *path)
        except TimeoutError:
            raise DeadlineExceeded("KV did not come in time", stage="total", after_s=timeout_s) from None
        if not has_come:
            raise TransferFailed("the twin was closed", path="link", reason="closed")
        self._board.num_bytes += num_bytes
        offer.end()
        return "link"

    @property
    def where(self) -> str:
        return self._worker

    def post(self, room: int, note: bytes, timeout_s: float) -> PaperPost:
        return PaperPost(self._board, room, note, timeout_s)

    async def meet(self, where: str, room: int, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._board.room(room))
        except TimeoutError:
            raise DeadlineExceeded("nobody came to the room", stage="total", after_s=timeout_s) from None
        finally:
            self._board.leave(room)

    def decline(self, ticket: bytes) -> None:
        try:
            self._board.find(ticket).end()
        except NotFound:
            return


def link_out(worker: str) -> str:
    return f"{worker} out"


def link_in(worker: str) -> str:
    return f"{worker} in"


_ENDS = (link_out, link_in)
