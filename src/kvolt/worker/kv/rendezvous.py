"""Decode-first handoffs: KV is transferred in parts while the prompt is computed.

The prefill and the decode worker get the request at the same time, with a random mailbox number. The prefill worker
posts a message per part of the prompt to its own agent; the decode worker allocates blocks and receives the messages
in order, before or after they are posted. It continues after the last part and computes what did not arrive. The
reader asks and pulls because only the owner of a memory writes to it (docs/adr/0010).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from kvolt.core.errors import MALFORMED, KvoltError, NotFound, ProtocolError
from kvolt.core.ids import BlockKey
from kvolt.core.request import READER_KEY_BYTES, Handoff, Rendezvous, Request, reader_proof
from kvolt.engines.contract import KvAddressable, KvAllocation, KvMovable, Prefill
from kvolt.worker.kv.mover import KvMessage, KvMover, KvOffer

log = logging.getLogger(__name__)

BEGIN_S = 5.0
"""Time for the prefill worker to start the request; later it is not expected to."""
WAIT_S = 60.0
"""Time for all parts; recomputing them takes less."""


class RendezvousEngine(Prefill, KvAddressable, KvMovable, Protocol):
    """Engine interface of decode-first handoffs."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of a prompt."""

    first: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=0)]
    """0 announces that the prompt has started."""
    ticket: bytes
    is_over: bool = False
    """Whether no further part comes."""
    proof: bytes = b""
    """Of the reader of the rendezvous."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Part).decode


class PromptParts:
    """Parts of one prompt announced by the prefill worker. A KvOffer without a ticket of its own."""

    ticket = b""

    def __init__(self, mover: KvMover, rendezvous: Rendezvous, hold_s: float) -> None:
        self._mover = mover
        self._rendezvous = rendezvous
        self._hold_s = hold_s
        self._reader_key = secrets.token_bytes(READER_KEY_BYTES)
        self._proof = reader_proof(self._reader_key, rendezvous.reader)
        self._offers: list[KvOffer] = []
        self._messages: list[KvMessage] = []

    def announce(self, first: int = 0, blocks: Sequence[int] = (), keys: Sequence[BlockKey] = ()) -> None:
        ticket = b""
        if blocks:
            offer = self._mover.offer(blocks, keys, self._hold_s, self._reader_key)
            self._offers.append(offer)
            ticket = offer.ticket
        self._post(Part(first, len(blocks), ticket, proof=self._proof))

    def end(self) -> None:
        """Announce that no further part comes."""
        self._post(Part(0, 0, b"", is_over=True))

    def _post(self, part: Part) -> None:
        mailbox = self._rendezvous.mailbox + len(self._messages)
        self._messages.append(self._mover.post(mailbox, _encode(part), WAIT_S))

    def cancel(self) -> None:
        """Cancel the offers. The messages stay: a reader fails at once instead of waiting."""
        for offer in self._offers:
            offer.cancel()

    def withdraw(self) -> None:
        """Cancel the messages as well; no reader is expected."""
        for message in self._messages:
            message.cancel()
        self.cancel()

    async def wait_done(self) -> None:
        """Wait until no block is read any more."""
        for offer in self._offers:
            await offer.wait_done()


async def announce_parts(
    engine: RendezvousEngine,
    request: Request,
    parts: PromptParts,
    computing: asyncio.Task[Handoff | KvoltError],
) -> Handoff:
    """Announce the blocks of a prompt as they are computed. Errors as of the engine's `prefill`. If this is cancelled,
    the prompt is still computed: blocks may be in transfer."""
    parts.announce()
    num_announced = 0
    await asyncio.sleep(0)  # `prefill` must be called before `computed_kv`
    try:
        while True:
            held = await engine.computed_kv(request.request_id, num_announced)
            if len(held.blocks) <= num_announced:
                break
            parts.announce(num_announced, held.blocks[num_announced:], held.keys[num_announced:])
            num_announced = len(held.blocks)
    except NotFound:
        log.debug("prompt ended early: request_id=%s", request.request_id)  # `computing` has the reason
    outcome = await asyncio.shield(computing)
    if isinstance(outcome, KvoltError):
        raise outcome
    return outcome


async def compute_prompt(engine: RendezvousEngine, request: Request) -> Handoff | KvoltError:
    """As `prefill`, but returns the error: a task must not raise before it is awaited."""
    try:
        return await engine.prefill(request)
    except KvoltError as error:
        return error


class PartReceiver:
    """Receives the parts of one prompt into an allocation."""

    def __init__(
        self,
        mover: KvMover,
        rendezvous: Rendezvous,
        keys: Sequence[BlockKey],
        allocation: KvAllocation,
        pull_s: float,
    ) -> None:
        self._mover = mover
        self._rendezvous = rendezvous
        self._keys = keys
        self._allocation = allocation
        self._pull_s = pull_s
        self._num_requested = 0
        self.by_path: Counter[str] = Counter()
        """Received blocks, by path. They are valid even if a later part fails."""
        self.moving_s = 0.0
        """Transfer time, without the time to compute the parts."""

    async def run(self, limit_s: float, on_part: Callable[[int, str], None]) -> None:
        """Receive parts until the allocation is full. `on_part`: called with the number of blocks and the path."""
        begin = reached = self._allocation.num_present
        end = begin + len(self._allocation.blocks)
        now = asyncio.get_running_loop().time
        ends_at = now() + limit_s
        while reached < end:
            part = await self._next(max(ends_at - now(), 0.0))
            last = min(part.first + part.num_blocks, end)
            if last <= reached:
                if part.num_blocks:
                    self._mover.decline(part.ticket, part.proof)
                continue
            if part.first > reached:
                raise ProtocolError("a part of a prompt is missing", rule="parts in order")
            started_at = now()
            try:
                path = await self._mover.pull(
                    part.ticket,
                    reached - part.first,
                    self._keys[part.first : part.first + part.num_blocks],
                    self._allocation.blocks[reached - begin : last - begin],
                    self._pull_s,
                    part.proof,
                )
            except KvoltError:
                self._mover.decline(part.ticket, part.proof)
                raise
            self.moving_s += now() - started_at
            self.by_path[path] += last - reached
            on_part(last - reached, path)
            reached = last

    async def decline(self, limit_s: float) -> None:
        """Decline all further parts, so that the prefill worker can release them."""
        reached = 0
        while reached < len(self._keys):
            try:
                part = await self._next(limit_s)
            except KvoltError:
                return
            if part.num_blocks:
                self._mover.decline(part.ticket, part.proof)
            reached = part.first + part.num_blocks

    async def _next(self, limit_s: float) -> Part:
        mailbox = self._rendezvous.mailbox + self._num_requested
        wait_s = min(limit_s, BEGIN_S) if not self._num_requested else limit_s
        part = _decode_part(await self._mover.receive(self._rendezvous.address, mailbox, wait_s))
        self._num_requested += 1
        if part.is_over:
            raise NotFound("the prompt was not computed to its end", kind="prompt", name=str(mailbox))
        return part


def _decode_part(message: bytes) -> Part:
    try:
        return _decode(message)
    except MALFORMED as error:
        raise ProtocolError(f"invalid message: not a part of a prompt ({error})", rule="part") from error
