"""Messages between frontends and a router process.

    frontend                                    router process
    OpenSession                  --- stream ->  reservations of the session end with this stream
    RouteRequest                 --- one each -> RouteResponse: a decision or a refusal
    FirstTokenNotice,
    ReleaseNotice                --- with the next RouteRequest, or in ReservationUpdates shortly after
                                 <- in stream -- RerouteNotice: move a request that has not started

A frontend numbers its requests (`ticket`), so that it can release a request whose response it never received.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import check_packed_hashes, pack_hashes, unpack_hashes
from kvolt.core.request import Handoff, KvSource, Request, Role, Sampling
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS

SESSION_ENDPOINT = f"{OWN_ENDPOINTS}router.session"
"""Endpoint of OpenSession and ReservationUpdates, at the address of the router's endpoint. Open sessions do
not delay draining, and a cordoned router still receives releases."""


def router_endpoint(namespace: str) -> EndpointAddress:
    """Endpoint of the router process of a namespace."""
    return EndpointAddress(namespace, "router", "route")


_TokenCount = Annotated[int, msgspec.Meta(ge=0)]

_MAX_PRIOR_TOKENS = 1 << 20


class FirstTokenNotice(msgspec.Struct, frozen=True, array_like=True):
    """The first token of a request has arrived."""

    ticket: int
    cached_tokens: int | None = None


class ReleaseNotice(msgspec.Struct, frozen=True, array_like=True):
    """A request has ended, or was given up before its decision."""

    ticket: int
    usage: Usage | None = None
    outcome: Outcome = Outcome.UNKNOWN
    """Outcome for the worker's circuit breaker."""


class OpenSession(msgspec.Struct, frozen=True, tag="open_session"):
    """Opens a session that lasts until this stream ends."""

    session: str


class ReservationUpdates(msgspec.Struct, frozen=True, omit_defaults=True, tag="reservation_updates"):
    session: str
    first_tokens: tuple[FirstTokenNotice, ...] = ()
    releases: tuple[ReleaseNotice, ...] = ()


class RouteRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks for an instance of an endpoint."""

    endpoint: str
    request: Request
    """Without tokens (`trace_prompt_length` is their number) and hashes. A handoff is reduced to its
    existence and progress."""
    excluded: tuple[InstanceId, ...] = ()
    block_size: int = 0
    """Block size of the endpoint's workers; 0 if irrelevant."""
    hashes: bytes = b""
    """Packed SequenceHashes of the request."""
    session: str = ""
    """Without a session nothing stays reserved."""
    ticket: int = 0
    first_tokens: tuple[FirstTokenNotice, ...] = ()
    releases: tuple[ReleaseNotice, ...] = ()
    prior_token_counts: tuple[_TokenCount | None, ...] = ()
    """Migrated requests: tokens already generated per choice; None for a choice that has ended."""
    role: Role = Role.AGGREGATED
    """Role of the endpoint's workers: a request may pin one of each role."""

    def __post_init__(self) -> None:
        check_packed_hashes(self.hashes)
        if sum(number or 0 for number in self.prior_token_counts) > _MAX_PRIOR_TOKENS:
            raise ValueError("more tokens than an answer can have")

    def full_request(self) -> Request:
        """The request as routers expect it."""
        request = self.request
        if self.hashes:
            request = msgspec.structs.replace(request, sequence_hashes=unpack_hashes(self.hashes))
        if self.prior_token_counts:
            prior_tokens = tuple(
                None if number is None else (0,) * number for number in self.prior_token_counts
            )
            request = msgspec.structs.replace(request, prior_tokens_by_choice=prior_tokens)
        return request


class RouteResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision, or the router's refusal.

    A refusal is a response and not an error of the call, which could also come from a stopping router.
    """

    instance: InstanceId | None = None
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    refused: ErrorInfo | None = None
    dp_rank: int | None = None
    is_queued: bool = False
    """Keepalive without a decision: the request is queued."""
    can_move: bool = False
    """A RerouteNotice may follow."""


class RerouteNotice(msgspec.Struct, frozen=True):
    """Move a request to another worker, which is reserved under its own ticket."""

    ticket: int
    to_ticket: int
    response: RouteResponse


def to_response(decision: Decision) -> RouteResponse:
    return RouteResponse(
        decision.instance.id,
        decision.overlap_blocks,
        decision.predicted_ms,
        decision.kv_sources,
        dp_rank=decision.dp_rank,
        can_move=decision.withdraw_hook is not None,
    )


def to_route_request(
    endpoint: str,
    request: Request,
    excluded: frozenset[InstanceId],
    block_size: int,
    role: Role = Role.AGGREGATED,
) -> RouteRequest:
    """Reduce a request to what routing needs: packed hashes instead of tokens, and everything that limits the
    answer."""
    grammar = request.grammar
    outline = Request(
        request_id=request.request_id,
        model=request.model,
        token_ids=(),
        stop=request.stop,
        sampling=Sampling(num_choices=request.sampling.num_choices),
        grammar=None if grammar is None else msgspec.structs.replace(grammar, text=""),
        block_size=request.block_size,
        lora=request.lora,
        routing=request.routing,
        deadline_s=request.deadline_s,
        trace_prompt_length=request.num_prompt_tokens,
        handoff=None if request.handoff is None else _handoff_outline(request.handoff),
        prefill_only=request.prefill_only,
        rendezvous=request.rendezvous,
    )
    return RouteRequest(
        endpoint,
        outline,
        excluded=tuple(sorted(excluded)),
        block_size=block_size,
        hashes=pack_hashes(request.sequence_hashes),
        prior_token_counts=_prior_token_counts(request),
        role=role,
    )


def _handoff_outline(handoff: Handoff) -> Handoff:
    """The handoff without its ticket, which is for the worker only, and without the prompt's blocks."""
    return msgspec.structs.replace(handoff, ticket=b"", block_hashes=(), token_ids=(), media=())


def _prior_token_counts(request: Request) -> tuple[int | None, ...]:
    if not request.has_prior_tokens:
        return ()
    is_open = set(request.open_choices)
    return tuple(
        len(request.prior_tokens_of(index)) if index in is_open else None
        for index in range(request.sampling.num_choices)
    )
