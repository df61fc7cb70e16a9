"""What frontends and a router process say to each other.

    frontend                                          router process
    Attach(session)       ----- stays open ----->     all that the session books ends with this stream
    RouteQuestion         ----- one each ------->     RouteAnswer: the decision, or a refusal
    Begun, Freed          ----- with the next question, or in News a moment later
                          <---- in the session -      Moved: a request that has not begun would better go elsewhere

Who asks numbers its questions: what it gave up on before the answer came it frees by that number like anything else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import InstanceId
from kvolt.core.packed_hashes import check_packed, packed, unpacked
from kvolt.core.request import Handoff, KvSource, Request, Role, Sampling
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS

SESSION_ENDPOINT = f"{OWN_ENDPOINTS}router.session"
"""For Attach and News, at the address of the router's endpoint: open sessions keep no process from draining, and a
cordoned one must still hear what is over."""


def router_endpoint(namespace: str) -> EndpointAddress:
    """Where the router of a namespace is asked."""
    return EndpointAddress(namespace, "router", "route")


_Told = Annotated[int, msgspec.Meta(ge=0)]

_MAX_RESUMED_TOKENS = 1 << 20


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """The first token of the answer to a request has come."""

    ticket: int
    cached_tokens: int | None = None


class Freed(msgspec.Struct, frozen=True, array_like=True):
    """A request is over, or was given up before it was decided."""

    ticket: int
    usage: Usage | None = None
    outcome: Outcome = Outcome.UNKNOWN
    """What that says about the worker."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """From now on until this stream ends, whatever ends it."""

    session: str


class News(msgspec.Struct, frozen=True, omit_defaults=True, tag="news"):
    session: str
    begun: tuple[Begun, ...] = ()
    freed: tuple[Freed, ...] = ()


class RouteQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which instance of an endpoint is to get this request?"""

    endpoint: str
    request: Request
    """Without tokens: `paper_length` says how many there are; and without hashes. Of a handoff it has what tells that
    there is one, and whether anything of the answer was told."""
    excluded: tuple[InstanceId, ...] = ()
    block_size: int = 0
    """Of the endpoint's workers; 0 where it does not matter."""
    hashes: bytes = b""
    """The request's SequenceHashes, packed."""
    session: str = ""
    """Without one nothing stays booked."""
    ticket: int = 0
    begun: tuple[Begun, ...] = ()
    freed: tuple[Freed, ...] = ()
    resumed: tuple[_Told | None, ...] = ()
    """Of a request that resumes: how many tokens of each choice were told; None for one that is over."""
    role: Role = Role.AGGREGATED
    """Of the endpoint's workers: a request may pin one of each role."""

    def __post_init__(self) -> None:
        check_packed(self.hashes)
        if sum(number or 0 for number in self.resumed) > _MAX_RESUMED_TOKENS:
            raise ValueError("more tokens than an answer can have")

    def whole_request(self) -> Request:
        """As a router is to see it."""
        request = self.request
        if self.hashes:
            request = msgspec.structs.replace(request, sequence_hashes=unpacked(self.hashes))
        if self.resumed:
            given = tuple(None if number is None else (0,) * number for number in self.resumed)
            request = msgspec.structs.replace(request, resume_choices=given)
        return request


class RouteAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A Decision by name, or the router's own refusal.

    A refusal is an answer and no failed call, so that it cannot be mistaken for a router that is stopping.
    """

    instance: InstanceId | None = None
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    refused: ErrorInfo | None = None
    dp_rank: int | None = None
    waits: bool = False
    """No answer yet: the request waits for a worker, and the router lives."""
    can_move: bool = False
    """It may be followed by a Moved."""


class Moved(msgspec.Struct, frozen=True):
    """A request would better go elsewhere, where it is booked already: under another ticket, to be freed like any."""

    ticket: int
    to_ticket: int
    answer: RouteAnswer


def answer_of(decision: Decision) -> RouteAnswer:
    return RouteAnswer(
        decision.instance.id,
        decision.overlap_blocks,
        decision.predicted_ms,
        decision.kv_sources,
        dp_rank=decision.dp_rank,
        can_move=decision.recall is not None,
    )


def question_of(
    endpoint: str,
    request: Request,
    excluded: frozenset[InstanceId],
    block_size: int,
    role: Role = Role.AGGREGATED,
) -> RouteQuestion:
    """Content goes as packed hashes; the tokens themselves are nobody's business but the worker's. Whatever tells how
    long the answer may become goes along."""
    grammar = request.grammar
    asked = Request(
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
        paper_length=request.num_prompt_tokens,
        handoff=None if request.handoff is None else _outline_of(request.handoff),
        prefill_only=request.prefill_only,
        rendezvous=request.rendezvous,
    )
    return RouteQuestion(
        endpoint,
        asked,
        excluded=tuple(sorted(excluded)),
        block_size=block_size,
        hashes=packed(request.sequence_hashes),
        resumed=_resumed_of(request),
        role=role,
    )


def _outline_of(handoff: Handoff) -> Handoff:
    """Its ticket is for the worker that goes on with it; the prompt's blocks are the request's."""
    return msgspec.structs.replace(handoff, ticket=b"", block_hashes=(), token_ids=(), media=())


def _resumed_of(request: Request) -> tuple[int | None, ...]:
    if not request.is_resumed:
        return ()
    is_open = set(request.open_choices)
    return tuple(
        len(request.resumed(index)) if index in is_open else None
        for index in range(request.sampling.num_choices)
    )
