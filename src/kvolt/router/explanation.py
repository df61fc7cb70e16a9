"""Explanation: for one request, who could take it, what each would cost and why, and who could not. Nothing is booked.

For people and tools; a router process answers it for its frontends.
"""

from __future__ import annotations

import msgspec

from kvolt.core.errors import Unavailable, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy.selector import Explained
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import QueueRouter, who_decides
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS

EXPLAIN_ENDPOINT = f"{OWN_ENDPOINTS}router.explain"
"""For a RouteQuestion, at the address of the router's endpoint; answered by an Explanation."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A place that could take the request."""

    process: str
    held_by: str
    """How it is known what it holds."""
    terms: Explained


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker that could not."""

    instance: InstanceId
    process: str
    why: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    policy: str
    decided_by: str
    """The process."""
    prompt_tokens: int
    block_size: int
    num_blocks: int
    """Whole ones: others are not kept."""
    output_tokens: float
    """As many as are expected."""
    candidates: tuple[Candidate, ...]
    """The least costly first."""
    left_out: tuple[LeftOut, ...]
    num_waiting: int
    """Requests before it, while every worker has enough to do."""
    problem: str = ""
    """Why there is no candidate."""


def explain_route(router: Router, request: Request, process: str) -> Explanation:
    """What this router, in this process, would do with a request now. Unsupported for one that weighs nothing."""
    deciding = who_decides(router)
    if not isinstance(deciding, KvRouter):
        raise Unsupported(
            "this router weighs nothing: it takes workers in turn, by chance or by how many requests they have",
            feature="explain",
            remedy="start the frontend with --router latency or --router classic",
        )
    problem = ""
    candidates: tuple[Candidate, ...] = ()
    try:
        candidates = tuple(_candidate(deciding, terms) for terms in deciding.explain(request))
    except Unavailable as error:
        problem = error.message
    return Explanation(
        endpoint=str(deciding.endpoint),
        policy=deciding.stats.policy,
        decided_by=process,
        prompt_tokens=request.num_prompt_tokens,
        block_size=request.block_size or 0,
        num_blocks=len(request.sequence_hashes),
        output_tokens=deciding.selector.expected_output_tokens(request),
        candidates=candidates,
        left_out=tuple(_left_out(instance, why) for instance, why in deciding.left_out(request)),
        num_waiting=router.num_waiting if isinstance(router, QueueRouter) else 0,
        problem=problem,
    )


def _candidate(router: KvRouter, terms: Explained) -> Candidate:
    process = router.process_of(terms.instance)
    return Candidate(process=process, held_by=router.held_by(terms.instance), terms=terms)


def _left_out(instance: Instance, why: str) -> LeftOut:
    return LeftOut(instance=instance.id, process=instance.process, why=why)
