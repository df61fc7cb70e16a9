"""Explanation of a routing decision: candidates with their cost terms, and excluded workers with reasons.

For operators and tools. Reserves nothing. A router process answers it for its frontends.
"""

from __future__ import annotations

import msgspec

from kvolt.core.endpoints import Instance
from kvolt.core.errors import Unavailable, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.choice import CandidateCost
from kvolt.router.kv_router import KvRouter
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import QueueRouter, deciding_router
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS

EXPLAIN_ENDPOINT = f"{OWN_ENDPOINTS}router.explain"
"""Takes a RouteRequest at the address of the router's endpoint, returns an Explanation."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker rank that can take the request."""

    process: str
    index_source: str
    """Source of its index entries."""
    terms: CandidateCost
    engine: str = ""
    """Engine of the worker; `remote` for an attached server."""
    has_estimated_times: bool = False
    """Whether its step times are estimated from a few measured steps."""


class ExcludedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A registered worker that cannot take the request."""

    instance: InstanceId
    process: str
    reason: str


class PrefillExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of where the prompt is computed, for a model with prefill workers."""

    mode: str
    """`local`: on the decode worker. `remote`: on a prefill worker, with a transfer. `prefill_worker`: prompt and
    answer on a prefill worker."""
    mode_costs: dict[str, float]
    """Predicted cost in seconds by mode; empty if the costs are not compared."""
    workers: Explanation
    """Prefill workers."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    policy: str
    decided_by: str
    """Deciding process."""
    prompt_tokens: int
    block_size: int
    num_blocks: int
    """Whole blocks; a partial last block is not cached."""
    output_tokens: float
    """Expected number."""
    candidates: tuple[Candidate, ...]
    """Cheapest first."""
    excluded_workers: tuple[ExcludedWorker, ...]
    num_waiting: int
    """Requests queued before it while all workers are saturated."""
    problem: str = ""
    """Why there is no candidate."""
    prefill: PrefillExplanation | None = None
    """None if the model has no prefill workers. With them, `candidates` are the decode workers; in mode `remote` their
    costs are those after the transfer."""


def explain_route(router: Router, request: Request, process: str) -> Explanation:
    """Explain what this router would decide now. Raises Unsupported for routers without a cost model."""
    deciding = deciding_router(router)
    if not isinstance(deciding, KvRouter):
        raise Unsupported(
            "router explain needs a router with a cost model, such as latency or classic",
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
        excluded_workers=tuple(
            _excluded_worker(instance, reason) for instance, reason in deciding.excluded_workers(request)
        ),
        num_waiting=router.num_waiting if isinstance(router, QueueRouter) else 0,
        problem=problem,
    )


def _candidate(router: KvRouter, terms: CandidateCost) -> Candidate:
    process = router.process_of(terms.instance)
    info = router.candidate_filter.registrations.infos().get(terms.instance)
    return Candidate(
        process=process,
        index_source=router.index_source(terms.instance),
        terms=terms,
        engine="" if info is None else info.engine,
        has_estimated_times=info is not None and info.has_estimated_latency,
    )


def _excluded_worker(instance: Instance, reason: str) -> ExcludedWorker:
    return ExcludedWorker(instance=instance.id, process=instance.process, reason=reason)
