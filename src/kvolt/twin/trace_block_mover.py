"""KV transfers between workers of a twin: blocks have a size but no bytes, and take time on simulated links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from itertools import count

from kvolt.core.errors import DeadlineExceeded, NotFound, TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.engines.sim.transfers import SimTransfers


class TraceBlockOffer:
    """KvOffer of a twin."""

    def __init__(self, board: TraceBlockBoard, number: int, worker: str, timeout_s: float) -> None:
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
        self._board.remove_offer(self.number)
        if not self._over.done():
            self._over.set_result(None)

    def wait_done(self) -> Awaitable[object]:
        return asyncio.shield(self._over)


class TraceBlockBoard:
    """Offers and mailboxes of all workers of a twin."""

    def __init__(self, transfers: SimTransfers, racks: Mapping[str, str]) -> None:
        """`racks` maps workers to their racks."""
        self.transfers = transfers
        self._racks = racks
        self._offers: dict[int, TraceBlockOffer] = {}
        self._mailboxes: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)
        self.num_bytes = 0
        """Transferred bytes."""

    def offer(self, worker: str, timeout_s: float) -> TraceBlockOffer:
        number = next(self._numbers)
        offer = self._offers[number] = TraceBlockOffer(self, number, worker, timeout_s)
        return offer

    def find(self, ticket: bytes) -> TraceBlockOffer:
        offer = self._offers.get(int(ticket))
        if offer is None:
            raise NotFound("the offer has ended", kind="ticket", name=ticket.decode())
        return offer

    def path(self, source: str, target: str) -> list[str]:
        """Links between two workers."""
        racks = self._racks.get(source), self._racks.get(target)
        between = (
            []
            if racks[0] == racks[1]
            else [link(rack) for rack, link in zip(racks, _ENDS, strict=True) if rack]
        )
        return [link_out(source), *between, link_in(target)]

    def remove_offer(self, number: int) -> None:
        self._offers.pop(number, None)

    def mailbox(self, number: int) -> asyncio.Future[bytes]:
        """Future of a mailbox's message, created by the sender or the receiver."""
        if number not in self._mailboxes:
            self._mailboxes[number] = asyncio.get_running_loop().create_future()
        return self._mailboxes[number]

    def remove_mailbox(self, number: int) -> None:
        self._mailboxes.pop(number, None)

    def close(self) -> None:
        self.transfers.close()
        for offer in list(self._offers.values()):
            offer.end()


class TraceBlockMessage:
    """KvMessage of a twin."""

    def __init__(self, board: TraceBlockBoard, mailbox: int, message: bytes, timeout_s: float) -> None:
        self._board = board
        self._mailbox = mailbox
        board.mailbox(mailbox).set_result(message)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry = asyncio.get_running_loop().call_later(timeout_s, self.cancel)

    def cancel(self) -> None:
        self._expiry.cancel()
        self._board.remove_mailbox(self._mailbox)
        if not self._over.done():
            self._over.set_result(None)

    def wait_done(self) -> Awaitable[object]:
        return asyncio.shield(self._over)


class TraceBlockMover:
    """KvMover of one worker of a twin."""

    def __init__(self, board: TraceBlockBoard, worker: str, block_bytes: int) -> None:
        self._board = board
        self._worker = worker
        self._block_bytes = block_bytes

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def offer(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float, reader_key: bytes = b""
    ) -> TraceBlockOffer:
        return self._board.offer(self._worker, timeout_s)

    async def pull(
        self,
        ticket: bytes,
        first: int,
        keys: Sequence[BlockKey],
        into: Sequence[int],
        timeout_s: float,
        proof: bytes = b"",
    ) -> str:
        offer = self._board.find(ticket)
        num_bytes = len(into) * self._block_bytes
        try:
            async with asyncio.timeout(timeout_s):
                path = self._board.path(offer.worker, self._worker)
                is_complete = await self._board.transfers.move(num_bytes, *path)
        except TimeoutError:
            raise DeadlineExceeded("KV transfer timed out", stage="total", after_s=timeout_s) from None
        if not is_complete:
            raise TransferFailed("the twin was closed", path="link", reason="closed")
        self._board.num_bytes += num_bytes
        offer.end()
        return "link"

    @property
    def address(self) -> str:
        return self._worker

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> TraceBlockMessage:
        return TraceBlockMessage(self._board, mailbox, message, timeout_s)

    async def receive(self, address: str, mailbox: int, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._board.mailbox(mailbox))
        except TimeoutError:
            raise DeadlineExceeded("message timed out", stage="total", after_s=timeout_s) from None
        finally:
            self._board.remove_mailbox(mailbox)

    def decline(self, ticket: bytes, proof: bytes = b"") -> None:
        try:
            self._board.find(ticket).end()
        except NotFound:
            return


def link_out(worker: str) -> str:
    return f"{worker} out"


def link_in(worker: str) -> str:
    return f"{worker} in"


_ENDS = (link_out, link_in)
