"""Scorer: the costs of all candidates for one request, and the pick among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, RoutingHints
from kvolt.router.breaker import Breakers
from kvolt.router.choice import usable_hashes
from kvolt.router.index.active_prompts import ActivePrompts, PrefixSharing, prefix_sharing
from kvolt.router.policy.affinity import SessionAffinity
from kvolt.router.policy.cost_model import CostInputs, Floats
from kvolt.router.policy.load import WorkerLoads, projected_load
from kvolt.router.policy.policy import (
    CostTerms,
    Policy,
    RequestView,
    WorkersView,
    add_retry_cost,
    apply_preference,
    cost_terms,
    pick_index,
)
from kvolt.router.selection.learning import OutcomeTracker
from kvolt.router.selection.overlap import Overlap, OverlapFinder
from kvolt.router.selection.roster import CandidateSet, WorkerTable
from kvolt.runtime.config.router_settings import RouterSettings

_Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class ScoredCandidates:
    """The candidates of a request with their costs."""

    candidates: CandidateSet
    request_view: RequestView
    workers: WorkersView
    policy_costs: Floats
    retry_costs: Floats
    """With the expected cost of a retry."""
    costs: Floats
    """With that and the preferences of the request."""
    preference: Floats
    is_full: _Mask
    """At the limit of concurrent requests; policies do not know the limit."""
    is_saturated: _Mask
    """Full, or with too many prompt tokens pending; policies know those and may still prefer the worker."""
    is_any_saturated: bool
    overlap: Overlap
    pace: Floats
    failure_rates: Floats
    lookup_s: float


@dataclass(slots=True)
class Scorer:
    """Reads the state of a selector and changes none of it."""

    policy: Policy
    now: Callable[[], float]
    rng: random.Random
    settings: RouterSettings
    worker_table: WorkerTable
    loads: WorkerLoads
    active_prompts: ActivePrompts
    overlaps: OverlapFinder
    outcomes: OutcomeTracker
    affinity: SessionAffinity
    breakers: Breakers | None

    def score(self, request: Request, allowed: Sequence[InstanceId]) -> ScoredCandidates:
        hints = request.routing
        candidates = self.worker_table.candidates(allowed, hints.pinned_dp_rank)
        if not candidates.worker_ranks:
            raise _unavailable(hints)
        now = self.now()
        sharing = prefix_sharing(self.active_prompts.shared_depths(usable_hashes(request)))
        view = RequestView(
            request.num_context_tokens,
            request.block_size or 1,
            1.0 if request.prefill_only else self.outcomes.output_tokens(request),
            hints.weights,
            self.loads.arrivals_per_s(now) / len(candidates.worker_ranks),
        )
        overlap = self.overlaps.overlap_of(request, candidates)
        lookup_s = self.now() - now
        pace = self.outcomes.pace(candidates.row_selector, now)
        affinity = self._affinities(hints, candidates, now)
        transfer_s = _transfer_s(request, overlap, candidates)
        workers = self._workers_view(view, overlap, sharing, pace, candidates, affinity, transfer_s, now)
        costs = policy_costs = self.policy(view, workers)
        failure_rates = self._failure_rates(candidates)
        if failure_rates is not candidates.zeros:
            costs = add_retry_cost(costs, failure_rates)
        retry_costs = costs
        preference = candidates.zeros
        if hints.preferred_taints:
            preference = _taint_preference(candidates, hints.preferred_taints)
            costs = apply_preference(costs, preference)
        is_full, is_saturated, is_any = self._saturation(candidates, workers)
        return ScoredCandidates(
            candidates,
            view,
            workers,
            policy_costs,
            retry_costs,
            costs,
            preference,
            is_full,
            is_saturated,
            is_any,
            overlap,
            pace,
            failure_rates,
            lookup_s,
        )

    def pick(self, hints: RoutingHints, scored: ScoredCandidates) -> tuple[int, bool]:
        """Index of the best candidate, and whether all are saturated. Full candidates are used only if all are."""
        temperature = self.settings.temperature if hints.temperature is None else hints.temperature
        if not scored.is_any_saturated:
            return pick_index(scored.costs, self.rng, temperature), False
        is_saturated = bool(scored.is_saturated.all())
        if scored.is_full.any():
            (unfilled,) = np.nonzero(~scored.is_full)
            if len(unfilled):
                return int(unfilled[pick_index(scored.costs[unfilled], self.rng, temperature)]), is_saturated
        return pick_index(scored.costs, self.rng, temperature), is_saturated

    def cost_terms(self, scored: ScoredCandidates) -> CostTerms:
        terms = cost_terms(self.policy, scored.request_view, scored.workers, scored.policy_costs)
        return {
            **terms,
            "retry": scored.retry_costs - scored.policy_costs,
            "preference": scored.costs - scored.retry_costs,
        }

    def _failure_rates(self, candidates: CandidateSet) -> Floats:
        """Recent failure rates; `candidates.zeros` itself if no worker has failed."""
        if not self.breakers:
            return candidates.zeros
        rates = self.breakers.failure_rates(
            [worker_rank.instance_id for worker_rank in candidates.worker_ranks]
        )
        return candidates.zeros if rates is None else np.array(rates)

    def _saturation(self, candidates: CandidateSet, workers: WorkersView) -> tuple[_Mask, _Mask, bool]:
        """Masks of full and of saturated candidates, and whether any is saturated."""
        max_requests, max_tokens = self._saturation_limits(candidates)
        is_full: _Mask = workers.requests >= max_requests
        is_saturated = is_full | (workers.prefill_tokens > max_tokens)
        is_any = bool(max_of(is_saturated))
        if is_any:
            # Without own requests all load is reported by others, perhaps long ago: it must not block the worker.
            has_own = self.loads.has_own_requests(candidates.row_selector)
            return is_full & has_own, is_saturated & has_own, is_any
        return is_full, is_saturated, is_any

    def _saturation_limits(self, candidates: CandidateSet) -> tuple[Floats, Floats]:
        """Limits of requests and pending prompt tokens per candidate."""
        if candidates.saturation_limits is None:
            settings = self.settings
            candidates.saturation_limits = (
                candidates.max_seqs * settings.saturated_seqs,
                candidates.max_batch_tokens * settings.saturated_batches,
            )
        return candidates.saturation_limits

    def _workers_view(
        self,
        view: RequestView,
        overlap: Overlap,
        sharing: PrefixSharing,
        pace: Floats,
        candidates: CandidateSet,
        affinity: Floats,
        transfer_s: Floats,
        now: float,
    ) -> WorkersView:
        loads, rows, cost_model = self.loads, candidates.row_selector, candidates.cost_model
        decoding, context, requests = loads.decoding[rows], loads.context_tokens[rows], loads.requests[rows]
        in_flight_tokens = loads.in_flight_tokens[rows]
        added_context = np.full(len(candidates.worker_ranks), view.prompt_tokens + view.output_tokens / 2.0)
        if cost_model.shared_read_savings is not None:
            saved_tokens = cost_model.shared_read_savings * view.block_size
            shared = saved_tokens * loads.shared_blocks[rows]
            context = np.maximum(context - shared, 0.0)
            in_flight_tokens = np.maximum(in_flight_tokens - shared, 0.0)
            added_context -= saved_tokens * np.minimum(overlap.effective_blocks, sharing.depth)
        beside, reading = projected_load(requests, in_flight_tokens)
        steps = self.outcomes.shared_steps(view.output_tokens)
        prefill_s, step_s, slowdown_s = cost_model.predict(
            CostInputs(view.prompt_tokens, view.block_size, steps, overlap.effective_blocks, added_context),
            pace,
            decoding,
            context,
            beside,
            reading,
        )
        missing_blocks = (
            loads.used_blocks[rows] + view.num_blocks - overlap.resident_blocks - candidates.total_blocks
        )
        return WorkersView(
            overlap_blocks=overlap.effective_blocks,
            prefill_tokens=loads.prefill_tokens[rows],
            blocks=loads.blocks[rows],
            requests=requests,
            decoding=decoding,
            queue_s=loads.queue_s(rows, now),
            prefill_s=prefill_s,
            slowdown_s=slowdown_s,
            beside=beside,
            step_s=step_s,
            copy_s=self._copy_s(view, overlap, sharing, step_s, slowdown_s, candidates, now),
            transfer_s=transfer_s,
            room_s=candidates.zeros
            if max_of(missing_blocks) <= 0.0
            else _room_s(
                missing_blocks, candidates.total_blocks, view, pace * cost_model.decode_s(decoding, context)
            ),
            total_blocks=candidates.total_blocks,
            affinity=affinity,
        )

    def _copy_s(
        self,
        view: RequestView,
        overlap: Overlap,
        sharing: PrefixSharing,
        step_s: Floats,
        slowdown_s: Floats,
        candidates: CandidateSet,
        now: float,
    ) -> Floats:
        """Predicted savings by a copy of the hot prefix at candidates that lack it.

        By Little's law as many requests with that prefix arrive during one answer as are in flight. Each would save
        the difference to the holder with the fewest requests, in its own answer and in those beside it. Half of that,
        as the difference shrinks with each request.
        """
        lacks_prefix = overlap.effective_blocks < sharing.hot_depth
        if not sharing.hot_depth or not max_of(lacks_prefix) or lacks_prefix.all():
            return candidates.zeros
        requests = self.loads.requests[candidates.row_selector]
        holder = int(np.where(lacks_prefix, np.inf, requests).argmin())
        answers_s = (
            view.output_tokens * step_s / (1.0 - self.loads.prefill_share(candidates.row_selector, now))
        )
        saved_s = answers_s[holder] - answers_s
        saved_s += 2.0 * slowdown_s[holder] * (requests[holder] - requests)
        return np.where(lacks_prefix, 0.5 * sharing.reuse * np.maximum(saved_s, 0.0), 0.0)

    def _affinities(self, hints: RoutingHints, candidates: CandidateSet, now: float) -> Floats:
        last_served = self.affinity.last_served(hints, now)
        index = None if last_served is None else candidates.index_of.get(last_served[0])
        if last_served is None or index is None:
            return candidates.zeros
        affinity = np.zeros(len(candidates.worker_ranks))
        affinity[index] = last_served[1]
        return affinity


def max_of(values: npt.NDArray[Any]) -> Any:
    """Maximum of a short array, at half the cost of `max` and `any`."""
    return values[values.argmax()]


def _room_s(missing_blocks: Floats, total_blocks: Floats, view: RequestView, decode_s: Floats) -> Floats:
    """Predicted time until the missing blocks are free: a full cache is released in about the time of one answer."""
    share = np.maximum(missing_blocks, 0.0) / np.maximum(total_blocks, 1.0)
    return np.where(total_blocks > 0, share * view.output_tokens * decode_s, 0.0)


def _transfer_s(request: Request, overlap: Overlap, candidates: CandidateSet) -> Floats:
    """Predicted transfer time: a decode worker fetches the blocks it lacks, a prefill worker sends the whole prompt."""
    links = request.routing.link_costs
    if links is None:
        return candidates.zeros
    token_s = np.array(
        [links.by_peer.get(worker_rank.instance_id, links.token_s) for worker_rank in candidates.worker_ranks]
    )
    if request.prefill_only:
        return token_s * request.num_context_tokens
    return token_s * np.maximum(
        request.num_context_tokens - overlap.device_blocks * (request.block_size or 1), 0.0
    )


def _taint_preference(candidates: CandidateSet, preferred: Mapping[str, float]) -> Floats:
    return np.array(
        [
            sum(weight for taint, weight in preferred.items() if taint in taints) if taints else 0.0
            for taints in candidates.taints
        ]
    )


def _unavailable(hints: RoutingHints) -> Unavailable:
    if hints.pinned_dp_rank is not None:
        return Unavailable(
            f"no instance that may take the request has the data-parallel rank {hints.pinned_dp_rank}",
            reason="no_rank",
        )
    return Unavailable("no instance may take the request", reason="no_instances")
