"""KV transfers between workers of a virtual cluster: real bytes of their engines, over links that break.

Replaces transfer agents, which use threads and sockets. A block is read from its owner's memory at the time of its
transfer, so an owner that reuses blocks too early sends another prompt's KV, as a real agent would: the checksum is
computed when the bytes leave.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Protocol

from xxhash import xxh3_64_intdigest

from kvolt.core.errors import DeadlineExceeded, NotFound, TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.core.request import reader_proof
from kvolt.kv import BlockId
from kvolt.runtime.security.identity import Identity

_BLOCK_S = 0.003
_POLL_S = 0.05
PATH = "virtual"


class Memory(Protocol):
    """An engine's blocks."""

    def read(self, block: BlockId) -> bytes: ...

    def write(self, block: BlockId, data: bytes) -> None: ...


class KvBoard:
    """Offers and messages of all workers of a cluster."""

    def __init__(
        self, is_linked: Callable[[str, str], bool], rng: random.Random, fail: Callable[[str], None]
    ) -> None:
        """`is_linked` returns whether bytes pass between two processes now. `fail`: reports a violation."""
        self.is_linked = is_linked
        self._fail = fail
        self._rng = rng
        self._numbers = count(1)
        self._offers: dict[int, _Offer] = {}
        self._messages: dict[tuple[str, int], asyncio.Future[bytes]] = {}
        self._posted: dict[tuple[str, int], _Message] = {}
        self.num_moved = 0
        """Blocks that arrived intact."""
        self.damaged_share = 0.0
        """Fraction of transferred blocks with a flipped bit."""

    async def linked(self, first: str, second: str) -> None:
        """Wait until bytes pass between the two."""
        while not self.is_linked(first, second):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def crash(self, owner: str) -> None:
        """End all offers and messages of a process."""
        for offer in [each for each in self._offers.values() if each.owner == owner]:
            offer.end()
        for key in [key for key in self._posted if key[0] == owner]:
            self._posted[key].end()
        for key in [key for key in self._messages if key[0] == owner]:
            self._messages.pop(key).cancel()

    @property
    def num_open(self) -> int:
        """Open offers and waiting readers. An unread message stays until its timeout."""
        return len(self._offers) + len(self._messages.keys() - self._posted.keys())

    def transmit(self, data: bytes) -> bytes:
        if self.damaged_share and self._rng.random() < self.damaged_share:
            at = self._rng.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    def add(
        self, owner: str, memory: Memory, blocks: Sequence[int], timeout_s: float, reader_key: bytes
    ) -> _Offer:
        number = next(self._numbers)
        offer = self._offers[number] = _Offer(self, number, owner, memory, tuple(blocks), timeout_s)
        offer.reader_key = reader_key
        return offer

    def find(self, ticket: bytes) -> _Offer:
        offer = self._offers.get(int(ticket))
        if offer is None:
            raise NotFound("the offer has ended", kind="ticket", name=ticket.decode())
        return offer

    def check_reader(self, offer: _Offer, proof: bytes, reader: Identity) -> None:
        """Every ticket that a worker gets is for this worker."""
        if proof != reader_proof(offer.reader_key, reader.uri):
            self._fail(f"{reader.process} got a ticket of {offer.owner} that is for another worker")

    def remove(self, number: int) -> None:
        self._offers.pop(number, None)

    def message(self, owner: str, number: int) -> asyncio.Future[bytes]:
        """Future of a message: posted by its owner, read once, created by the first of the two."""
        key = (owner, number)
        if key not in self._messages:
            self._messages[key] = asyncio.get_running_loop().create_future()
        return self._messages[key]

    def post(self, owner: str, number: int, payload: bytes, timeout_s: float) -> _Message:
        message = self._posted[owner, number] = _Message(self, owner, number, timeout_s)
        self.message(owner, number).set_result(payload)
        return message

    def drop_message(self, owner: str, number: int) -> None:
        """Remove a message that was read or has ended."""
        self._messages.pop((owner, number), None)
        posted = self._posted.pop((owner, number), None)
        if posted is not None:
            posted.end()


class _Expiring:
    """Ends once, at the latest after its timeout."""

    def __init__(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = loop.create_future()
        self._expiry = loop.call_later(timeout_s, self.end)

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def end(self) -> None:
        self._expiry.cancel()
        if not self._over.done():
            self._over.set_result(None)

    def cancel(self) -> None:
        self.end()

    def wait_done(self) -> Awaitable[object]:
        return asyncio.shield(self._over)


class _Offer(_Expiring):
    """A `KvOffer`."""

    def __init__(
        self,
        board: KvBoard,
        number: int,
        owner: str,
        memory: Memory,
        blocks: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s)
        self._board = board
        self._number = number
        self.owner = owner
        self.memory = memory
        self.blocks = blocks
        self.is_read = False
        self.reader_key = b""

    @property
    def ticket(self) -> bytes:
        return str(self._number).encode()

    def cancel(self) -> None:
        """End the offer, after the current read if there is one."""
        self._board.remove(self._number)
        if not self.is_read:
            self.end()

    def end(self) -> None:
        self._board.remove(self._number)
        super().end()


class _Message(_Expiring):
    """A `KvMessage`."""

    def __init__(self, board: KvBoard, owner: str, number: int, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._drop = partial(board.drop_message, owner, number)

    def end(self) -> None:
        if not self.is_over:
            super().end()
            self._drop()


class VirtualMover:
    """The `KvMover` of one worker."""

    def __init__(
        self,
        board: KvBoard,
        owner: str,
        memory: Memory,
        block_bytes: int,
        identity: Identity | None = None,
    ) -> None:
        """`identity`: of the owner, in a cluster that checks access."""
        self._identity = identity
        self._board = board
        self._owner = owner
        self._memory = memory
        self.block_bytes = block_bytes

    @property
    def address(self) -> str:
        return self._owner

    def offer(
        self, blocks: Sequence[int], keys: Sequence[BlockKey], timeout_s: float, reader_key: bytes = b""
    ) -> _Offer:
        return self._board.add(self._owner, self._memory, blocks, timeout_s, reader_key)

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
        if self._identity is not None:
            self._board.check_reader(offer, proof, self._identity)
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(offer, first, keys, into)
        except TimeoutError:
            raise DeadlineExceeded("KV transfer timed out", stage="total", after_s=timeout_s) from None
        finally:
            offer.is_read = False
        offer.end()
        return PATH

    async def _read(self, offer: _Offer, first: int, keys: Sequence[BlockKey], into: Sequence[int]) -> None:
        offer.is_read = True
        for position, block in enumerate(into, first):
            await asyncio.sleep(_BLOCK_S)
            await self._board.linked(offer.owner, self._owner)
            if offer.is_over:
                raise TransferFailed("the offer ended", path=PATH, reason="gone")
            data = offer.memory.read(BlockId(offer.blocks[position]))
            checksum = _checksum(data, keys[position])
            data = self._board.transmit(data)
            if _checksum(data, keys[position]) != checksum:
                raise TransferFailed("checksum mismatch", path=PATH, reason="checksum")
            self._memory.write(BlockId(block), data)
            self._board.num_moved += 1

    def decline(self, ticket: bytes, proof: bytes = b"") -> None:
        try:
            offer = self._board.find(ticket)
        except NotFound:
            return
        if self._board.is_linked(offer.owner, self._owner):
            offer.cancel()

    def post(self, mailbox: int, message: bytes, timeout_s: float) -> _Message:
        return self._board.post(self._owner, mailbox, message, timeout_s)

    async def receive(self, address: str, mailbox: int, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                message = await asyncio.shield(self._board.message(address, mailbox))
                await self._board.linked(address, self._owner)
                return message
        except TimeoutError:
            raise DeadlineExceeded("message timed out", stage="total", after_s=timeout_s) from None
        except asyncio.CancelledError:
            if self._board.message(address, mailbox).cancelled():
                raise TransferFailed("its owner crashed", path=PATH, reason="gone") from None
            raise
        finally:
            self._board.drop_message(address, mailbox)


def _checksum(data: bytes, key: BlockKey) -> int:
    return xxh3_64_intdigest(data, int.from_bytes(key[:8], "little"))
