"""Remote prefill on SGLang: creates the tickets by which a decode worker's SGLang gets the KV.

SGLang's prefill waits for the decode side before it computes: both have the request at the same time and meet in a room
of the prefill side's bootstrap server. The ticket is available at once and names the room. SGLang transfers the KV, the
first token and its logprobs.
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
    """Content of `Handoff.ticket`."""

    host: str
    port: int
    rooms: dict[int, int]
    """Bootstrap room per choice index; SGLang uses one per request."""
    rank: int | None = None
    """DP rank of the prefill worker, if it has several."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode


class Prefills:
    """See the module. `send`: sends a command to the host."""

    def __init__(self, send: Callable[[Generate | Abort], None]) -> None:
        self._send = send
        self._prompts: dict[RequestId, set[str]] = {}
        """SGLang's ids of unfinished choices, by request."""
        self._by_rid: dict[str, RequestId] = {}
        self._number = 0

    def start(
        self,
        request: Request,
        facts: Facts,
        host: str,
        make: Callable[..., Generate],
        hold_s: float,
    ) -> Handoff:
        """Submit a prompt. `make`: creates SGLang's request from a choice and bootstrap fields."""
        request_id = request.request_id
        if request_id in self._prompts:
            raise InvalidRequest(f"request {request_id} exists already", param="request_id")
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
            choice = Choice(request, index, name, num_tokens=len(request.prior_tokens_of(index)))
            command = make(choice, **{**bootstrap_fields(ticket, index), "routed_dp_rank": rank})
            rids.add(command.rid)
            self._send(command)
        self._prompts[request_id] = rids
        self._by_rid.update(dict.fromkeys(rids, request_id))
        return Handoff(ticket=_encode(ticket), prefill_instance=InstanceId(""), expires_in_s=hold_s)

    def on_row(self, row: Row) -> bool:
        """Handle an output. False if it is not a remote prefill. The decode worker reports the result."""
        request_id = self._by_rid.get(row.rid)
        if request_id is None:
            return False
        if row.finish is not None:
            self._forget(request_id, [row.rid])
        return True

    def release(self, request_id: RequestId) -> None:
        """Abort the unfinished choices of a prompt."""
        for rid in sorted(self._prompts.get(request_id, ())):
            self._send(Abort(rid))
            self._forget(request_id, [rid])

    def _forget(self, request_id: RequestId, rids: Sequence[str]) -> None:
        open_rids = self._prompts[request_id]
        for rid in rids:
            open_rids.discard(rid)
            del self._by_rid[rid]
        if not open_rids:
            del self._prompts[request_id]


def bootstrap_fields(ticket: Ticket, index: int) -> dict[str, Any]:
    """Bootstrap fields of SGLang's request for a choice."""
    return {
        "bootstrap_host": ticket.host,
        "bootstrap_port": ticket.port,
        "bootstrap_room": ticket.rooms[index],
    }


def check_bootstrap(request: Request) -> Ticket:
    """The ticket of a request with remote prefill. Unsupported without one: a decode worker of SGLang cannot
    prefill."""
    handoff = request.handoff
    if handoff is None:
        raise Unsupported(
            "a decode worker of SGLang cannot compute prompts", feature="decode without a prefill"
        )
    if handoff.first_tokens is not None:
        raise Unsupported("the handoff must come from SGLang", feature="handoff")
    if request.sampling.prompt_logprobs is not None:
        raise Unsupported("SGLang has no prompt logprobs with remote prefill", feature="prompt_logprobs")
    try:
        if len(handoff.ticket) > MAX_TICKET_BYTES:
            raise msgspec.ValidationError("too long")
        ticket = _decode(handoff.ticket)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the handoff's ticket is not from SGLang: {error}", param="handoff") from error
    if not set(request.open_choices) <= set(ticket.rooms):
        raise InvalidRequest("the handoff's ticket is for other choices", param="handoff")
    return ticket
