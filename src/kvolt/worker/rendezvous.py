"""Decode-first handoffs: KV sent while a prompt is computed, and received in the order of its parts.

Prefill and decode have the request at the same time, and a number that nobody else knows. Decode makes room, then asks
prefill for one part of the prompt after the other; either may come first, since a part is told by prefill's own agent
and waits there. Decode goes on once the last part is here, and computes what did not come. Where the parts are told is
the prefill worker's side: only the owner of a memory writes to it, so it is the reader that asks (docs/adr/0010).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from kvolt.core.errors import KvoltError, NotFound, ProtocolError
from kvolt.core.ids import BlockKey
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.engines.contract import KvMovable, KvPlaced, KvRoom, Prefill
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.worker.kv_moving import KvMover, KvOffer, KvPost

log = logging.getLogger(__name__)

BEGIN_S = 5.0
"""For prefill to have the request: after that it will not come."""
WAIT_S = 60.0
"""For all parts to come: to compute them here would have taken less."""


class MeetingEngine(Prefill, KvPlaced, KvMovable, Protocol):
    """An engine that takes part."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some blocks of a prompt, one after the other."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0)]
    """0 for word that the prompt is begun."""
    ticket: bytes
    is_over: bool = False
    """Nothing comes any more."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Part).decode


class Parts:
    """What prefill has told of one prompt; a KvOffer that has no ticket of its own."""

    ticket = b""

    def __init__(self, mover: KvMover, meeting: Rendezvous, hold_s: float) -> None:
        self._mover = mover
        self._meeting = meeting
        self._hold_s = hold_s
        self._offers: list[KvOffer] = []
        self._posts: list[KvPost] = []

    def tell(self, first: int = 0, blocks: Sequence[int] = (), keys: Sequence[BlockKey] = ()) -> None:
        offer = self._mover.offer(blocks, keys, self._hold_s) if blocks else None
        if offer is not None:
            self._offers.append(offer)
        self._post(Part(first, len(blocks), b"" if offer is None else offer.ticket))

    def end(self) -> None:
        """Nothing more comes, and nobody shall wait for it."""
        self._post(Part(0, 0, b"", is_over=True))

    def _post(self, part: Part) -> None:
        room = self._meeting.room + len(self._posts)
        self._posts.append(self._mover.post(room, _encode(part), WAIT_S))

    def cancel(self) -> None:
        """Nobody may fetch it any more. Who asks is still told of it: that shows at once that it is gone."""
        for offer in self._offers:
            offer.cancel()

    def take_back(self) -> None:
        """Nobody will ask, either."""
        for post in self._posts:
            post.cancel()
        self.cancel()

    async def over(self) -> None:
        """No block of it is read any more."""
        for offer in self._offers:
            await offer.over()


async def push(
    engine: MeetingEngine, request: Request, parts: Parts, computing: asyncio.Task[Handoff | KvoltError]
) -> Handoff:
    """Tell of the blocks of a prompt as they are there. Errors as of the engine's `prefill`; cancelled, the prompt is
    still computed: its blocks may be on their way."""
    parts.tell()
    num_told = 0
    await asyncio.sleep(0)  # the engine has been asked for the prompt before it is asked how far that is
    try:
        while True:
            held = await engine.computed_kv(request.request_id, num_told)
            if len(held.blocks) <= num_told:
                break
            parts.tell(num_told, held.blocks[num_told:], held.keys[num_told:])
            num_told = len(held.blocks)
    except NotFound:
        log.debug("the prompt of %s ended before its last part", request.request_id)  # and says itself why
    outcome = await asyncio.shield(computing)
    if isinstance(outcome, KvoltError):
        raise outcome
    return outcome


async def compute(engine: MeetingEngine, request: Request) -> Handoff | KvoltError:
    """As `prefill`, for a task of its own: what it raises is told by who asked for it."""
    try:
        return await engine.prefill(request)
    except KvoltError as error:
        return error


class Receiving:
    """The parts of one prompt, as they come into the room that was made for them."""

    def __init__(
        self, mover: KvMover, meeting: Rendezvous, keys: Sequence[BlockKey], room: KvRoom, pull_s: float
    ) -> None:
        self._mover = mover
        self._meeting = meeting
        self._keys = keys
        self._room = room
        self._pull_s = pull_s
        self._num_asked = 0
        self.by_path: Counter[str] = Counter()
        """Blocks that have come. They are good, though the rest may not come."""
        self.moving_s = 0.0
        """That they were on their way: not what it took to compute them."""

    async def run(self, limit_s: float, came: Callable[[int, str], None]) -> None:
        """Ask for one part after the other until the room is full. `came` hears how many blocks came by which path."""
        begin = reached = self._room.num_present
        end = begin + len(self._room.blocks)
        now = asyncio.get_running_loop().time
        ends_at = now() + limit_s
        while reached < end:
            part = await self._next(max(ends_at - now(), 0.0))
            last = min(part.first + part.num_blocks, end)
            if last <= reached:
                if part.num_blocks:
                    self._mover.decline(part.ticket)
                continue
            if part.first > reached:
                raise ProtocolError("a part of a prompt is missing", rule="parts in order")
            asked_at = now()
            try:
                path = await self._mover.pull(
                    part.ticket,
                    reached - part.first,
                    self._keys[part.first : part.first + part.num_blocks],
                    self._room.blocks[reached - begin : last - begin],
                    self._pull_s,
                )
            except KvoltError:
                self._mover.decline(part.ticket)
                raise
            self.moving_s += now() - asked_at
            self.by_path[path] += last - reached
            came(last - reached, path)
            reached = last

    async def turn_down(self, limit_s: float) -> None:
        """Nothing more of it is wanted: who computes it need not keep it."""
        reached = 0
        while reached < len(self._keys):
            try:
                part = await self._next(limit_s)
            except KvoltError:
                return
            if part.num_blocks:
                self._mover.decline(part.ticket)
            reached = part.first + part.num_blocks

    async def _next(self, limit_s: float) -> Part:
        room = self._meeting.room + self._num_asked
        wait_s = min(limit_s, BEGIN_S) if not self._num_asked else limit_s
        part = _read(await self._mover.meet(self._meeting.address, room, wait_s))
        self._num_asked += 1
        if part.is_over:
            raise NotFound("the prompt was not computed to its end", kind="prompt", name=str(room))
        return part


def _read(note: bytes) -> Part:
    try:
        return _decode(note)
    except MALFORMED as error:
        raise ProtocolError(f"no part of a prompt ({error})", rule="part") from error
