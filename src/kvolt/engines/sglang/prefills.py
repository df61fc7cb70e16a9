"""Prefills: prompts that SGLang computes for others, and the ticket by which another SGLang meets it for their KV.

SGLang's prefill waits for the decode side before it computes: both have the request at the same time, and find each
other by a room at the prefill side's bootstrap server. So the ticket is there at once, and names the room; the bytes,
the first token and its logprobs are SGLang's affair.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.external.answers import Choice
from kvolt.engines.sglang.host.messages import Abort, Facts, Generate, Row

_ROOM_BITS = 62
MAX_TICKET_BYTES = 1 << 16


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What is in `Handoff.ticket`, for the two engines."""

    host: str
    port: int
    rooms: dict[int, int]
    """Of each choice by its index: SGLang has a room for each of its requests."""
    rank: int | None = None
    """Of the prefill side, where it has several."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode


class Prefills:
    """See the module. `send`: to the host."""

    def __init__(self, send: Callable[[Generate | Abort], None]) -> None:
        self._send = send
        self._prompts: dict[RequestId, set[str]] = {}
        """Names of the choices that SGLang still has."""
        self._by_rid: dict[str, RequestId] = {}
        self._number = 0

    def begin(
        self,
        request: Request,
        facts: Facts,
        host: str,
        make: Callable[..., Generate],
        hold_s: float,
    ) -> Handoff:
        """`make`: a choice and where it is met, as SGLang's request."""
        request_id = request.request_id
        if request_id in self._prompts:
            raise InvalidRequest(f"request {request_id} is here already", param="request_id")
        assert facts.bootstrap_port is not None, "not a prefill worker"
        self._number += 1
        rank = request.routing.pinned_dp_rank if facts.num_ranks > 1 else None
        if facts.num_ranks > 1 and rank is None:
            rank = self._number % facts.num_ranks
        rooms = {index: secrets.randbits(_ROOM_BITS) for index in request.open_choices}
        ticket = Ticket(host, facts.bootstrap_port, rooms, rank)
        rids: set[str] = set()
        for index in request.open_choices:
            name = f"{request_id}/p{self._number}/{index}"
            choice = Choice(request, index, name, num_tokens=len(request.resumed(index)))
            made = make(choice, **{**meeting(ticket, index), "routed_dp_rank": rank})
            rids.add(made.rid)
            self._send(made)
        self._prompts[request_id] = rids
        self._by_rid.update(dict.fromkeys(rids, request_id))
        return Handoff(ticket=_encode(ticket), prefill_instance=InstanceId(""), expires_in_s=hold_s)

    def take(self, row: Row) -> bool:
        """Whether it was of a prompt of ours: the other side tells what came of it."""
        request_id = self._by_rid.get(row.rid)
        if request_id is None:
            return False
        if row.finish is not None:
            self._forget(request_id, [row.rid])
        return True

    def release(self, request_id: RequestId) -> None:
        """What SGLang still has of it is not wanted."""
        for rid in sorted(self._prompts.get(request_id, ())):
            self._send(Abort(rid))
            self._forget(request_id, [rid])

    def _forget(self, request_id: RequestId, rids: Sequence[str]) -> None:
        left = self._prompts[request_id]
        for rid in rids:
            left.discard(rid)
            del self._by_rid[rid]
        if not left:
            del self._prompts[request_id]


def meeting(ticket: Ticket, index: int) -> dict[str, Any]:
    """Where a choice is met, in fields of SGLang's request."""
    return {
        "bootstrap_host": ticket.host,
        "bootstrap_port": ticket.port,
        "bootstrap_room": ticket.rooms[index],
    }


def check_meeting(request: Request) -> Ticket:
    """The ticket of a request whose prompt is computed elsewhere. Unsupported without one: a decode worker of SGLang
    computes no prompts."""
    handoff = request.handoff
    if handoff is None:
        raise Unsupported("a decode worker of SGLang computes no prompts", feature="decode without a prefill")
    if handoff.first_tokens is not None:
        raise Unsupported("SGLang takes prompts over from SGLang only", feature="handoff")
    if request.sampling.prompt_logprobs is not None:
        raise Unsupported(
            "SGLang has no logprobs of prompts that are computed elsewhere", feature="prompt_logprobs"
        )
    try:
        if len(handoff.ticket) > MAX_TICKET_BYTES:
            raise msgspec.ValidationError("it is too long")
        ticket = _decode(handoff.ticket)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the handoff's ticket is none of SGLang's: {error}", param="handoff") from error
    if not set(request.open_choices) <= set(ticket.rooms):
        raise InvalidRequest("the handoff's ticket is of other choices", param="handoff")
    return ticket
