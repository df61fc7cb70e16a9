"""Selector: chooses the worker rank with the lowest cost for a request. Pure.

The routing decision without a runtime, usable from a process, a service or another program. `set_workers` defines the
workers, each request names the workers that may take it, a prefix index is fed by the caller, time and randomness are
injected. `choose` changes nothing; a reservation counts until it is released.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.latency import Floats
from kvolt.core.load import LoadReport
from kvolt.core.request import Request, RoutingHints
from kvolt.router.breaker import Breakers
from kvolt.router.index.active_prompts import ActivePrompts, PrefixSharing, prefix_sharing
from kvolt.router.index.overlap import Overlap, OverlapFinder, PrefixIndex, usable_hashes
from kvolt.router.index.pending_blocks import PendingBlocks
from kvolt.router.policy.affinity import SessionAffinity
from kvolt.router.policy.choice import CandidateCost, Choice
from kvolt.router.policy.cost_model import CostInputs
from kvolt.router.policy.forecast import Forecast
from kvolt.router.policy.learning import OutcomeTracker, RequestObserver
from kvolt.router.policy.load import LoadReservation, WorkerLoads, projected_load
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
from kvolt.router.policy.roster import CandidateSet, WorkerTable
from kvolt.router.policy.shadow import ShadowPolicy, ShadowVerdict
from kvolt.router.stats import RouterStats
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank, WorkerRankLoad
from kvolt.runtime.config.router_settings import RouterSettings

_Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _ScoredCandidates:
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


class Selector:
    """See the module."""

    def __init__(
        self,
        prefix_index: PrefixIndex,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        settings: RouterSettings | None = None,
        observer: RequestObserver | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        """`observer` receives the outcomes of requests. Without `breakers` failure rates are 0."""
        self._policy = policy
        self._now = now
        self._rng = rng
        self._settings = settings = settings or RouterSettings()
        self._loads = WorkerLoads()
        self._pending_blocks = PendingBlocks()
        self._active_prompts = ActivePrompts()
        self._overlaps = OverlapFinder(prefix_index, self._pending_blocks, settings)
        self._outcomes = OutcomeTracker(observer, settings.correct_times)
        self._worker_table = WorkerTable(self._loads, self._add_row, self._drop_row, self._outcomes.drop_row)
        self._affinity = SessionAffinity(settings.affinity_half_life_s, settings.affinity_sessions)
        self._in_flight: dict[int, Choice] = {}
        self._tiered_workers: frozenset[InstanceId] = frozenset()
        self._breakers = breakers
        self.shadow: ShadowPolicy | None = None
        """Second policy that is evaluated but decides nothing."""

    @property
    def num_in_flight(self) -> int:
        """Reservations not released yet."""
        return self._loads.num_reservations

    @property
    def stats(self) -> RouterStats:
        return self._outcomes.stats

    @property
    def num_sessions(self) -> int:
        """Sessions with affinity state."""
        return self._affinity.num_sessions

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        """Set the registered workers, None for unknown metadata. Reservations at other workers are dropped."""
        self._worker_table.set_workers(infos)
        self._outcomes.observer.set_workers(infos)
        self._tiered_workers = frozenset(
            each for each, info in infos.items() if info is not None and info.has_tiers
        )

    # --- decisions

    def choose(
        self, request: Request, allowed: Sequence[InstanceId], kv_sources: tuple[WorkerDpRank, ...] = ()
    ) -> Choice:
        """Choose the best worker rank of the allowed workers. Reserves nothing. Raises Unavailable if there
        is none.

        `kv_sources` are worker ranks that share KV with the chosen one. Pass the same tuples while they do not
        change: the candidate set is cached by identity.
        """
        started_at = self._now()
        scored = self._score(request, allowed)
        index, is_saturated = self._pick(request.routing, scored)
        view, workers = scored.request_view, scored.workers
        overlap = int(workers.overlap_blocks[index])
        prefill_s = float(workers.prefill_s[index])
        worker_rank = scored.candidates.worker_ranks[index]
        source, source_blocks = self._overlaps.best_source(scored.overlap, kv_sources)
        if (
            source is None
            or source_blocks <= scored.overlap.local_blocks[index]
            or source.instance_id == worker_rank.instance_id
        ):
            source, source_blocks = None, 0
        choice = Choice(
            worker_rank,
            overlap,
            float(workers.queue_s[index]),
            prefill_s,
            is_saturated,
            request,
            view.prompt_tokens - overlap * view.block_size,
            view.num_blocks + view.output_tokens / view.block_size,
            int(scored.overlap.device_blocks[index]),
            int(_max(workers.overlap_blocks)),
            source,
            source_blocks,
            worker_rank.instance_id in self._tiered_workers,
            prefill_s / float(scored.pace[index]),
            float(workers.room_s[index]),
            0.0 if request.prefill_only else float(workers.transfer_s[index]),
            None if self.shadow is None else _shadow_verdict(self.shadow, scored, index),
        )
        self.stats.record_overhead(scored.lookup_s, self._now() - started_at)
        return choice

    def forecast(self, request: Request, allowed: Sequence[InstanceId]) -> Forecast:
        """Predict the outcome at the best worker rank. Reserves nothing."""
        scored = self._score(request, allowed)
        index, _ = self._pick(request.routing, scored)
        view, workers = scored.request_view, scored.workers
        rows = scored.candidates.row_selector
        decoding, context = self._loads.decoding[rows], self._loads.context_tokens[rows]
        cost_model, pace = scored.candidates.cost_model, float(scored.pace[index])
        step_s = scored.pace * cost_model.decode_s(decoding + 1.0, context + view.prompt_tokens)
        base_s, more_s = cost_model.step_parts(view.prompt_tokens, view.output_tokens, index)
        queue_s = max(float(workers.queue_s[index]), float(workers.room_s[index]))
        prefill_s = float(workers.prefill_s[index])
        return Forecast(
            instance=scored.candidates.worker_ranks[index].instance_id,
            queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=float(workers.transfer_s[index]),
            num_arriving=view.arrivals_per_s * (queue_s + prefill_s),
            decoding=float(decoding[index]),
            step_s=float(step_s[index]),
            slowdown_s=float(workers.slowdown_s[index]),
            output_tokens=view.output_tokens,
            missing_tokens=max(
                view.prompt_tokens - int(scored.overlap.device_blocks[index]) * view.block_size, 0
            ),
            has_own_model=cost_model.has_own_model[index],
            num_worker_ranks=len(decoding),
            total_decoding=float(decoding.sum()),
            base_step_s=pace * base_s,
            added_step_s=pace * more_s,
        )

    def reserve(self, choice: Choice) -> int:
        """Reserve the chosen worker rank; return a reservation id. Raises Unavailable if the worker is gone."""
        row = self._worker_table.rows.get(choice.worker_rank)
        if row is None:
            raise Unavailable(f"{choice.worker_rank.instance_id} is gone", reason="gone")
        request, now = choice.request, self._now()
        own_s = max(float(self._loads.idle_at[row]) - now, 0.0)
        reservation_id = self._loads.reserve(
            row,
            request.num_context_tokens,
            choice.prefill_tokens,
            choice.blocks,
            choice.prefill_s,
            now,
        )
        self._pending_blocks.add_prompt(row, reservation_id, request.sequence_hashes)
        self._loads.add_shared_blocks(
            row, self._active_prompts.add_prompt(row, reservation_id, request.sequence_hashes)
        )
        self._in_flight[reservation_id] = choice
        if self.shadow is not None:
            self.shadow.record(choice.shadow_verdict)
        self._outcomes.on_reserved(reservation_id, choice, row, own_s, now)
        return reservation_id

    def mark_first_token(self, reservation_id: int, cached_tokens: int | None) -> None:
        """Record the first token of a reservation."""
        now = self._now()
        reservation = self._loads.mark_first_token(reservation_id, now)
        self._end_prefill(reservation_id, reservation)
        if reservation is not None:
            self._outcomes.on_first_token(reservation_id, cached_tokens, now)
        choice = self._in_flight.get(reservation_id)
        if choice is not None:
            self._affinity.record(choice.request.routing, choice.worker_rank, now)

    def release(self, reservation_id: int, usage: Usage | None) -> None:
        """End a reservation. Unknown ids are ignored."""
        reservation = self._loads.release(reservation_id, self._now())
        self._end_prefill(reservation_id, reservation)
        if reservation is not None:
            self._loads.add_shared_blocks(
                reservation.row, -self._active_prompts.remove_prompt(reservation_id)
            )
        self._in_flight.pop(reservation_id, None)
        self._outcomes.on_released(reservation_id, usage)

    def on_report(self, report: LoadReport) -> None:
        """Apply a load report. Unknown worker ranks are ignored."""
        row = self._worker_table.rows.get(WorkerDpRank(InstanceId(report.instance), report.load.dp_rank))
        if row is not None:
            self._loads.on_report(row, report.load)

    def queue_s(self, reservation_id: int) -> float:
        """Predicted time until all own prompts at the reservation's worker rank are computed; 0 if unknown."""
        choice = self._in_flight.get(reservation_id)
        row = None if choice is None else self._worker_table.rows.get(choice.worker_rank)
        return 0.0 if row is None else self._loads.own_queue_s(row, self._now())

    # --- gossip

    def own_loads(self) -> list[ReservedLoad]:
        """Loads reserved by this router, for other replicas; worker ranks without any are omitted."""
        return (
            self._loads.own_loads(self._worker_table.rows, self._now())
            if self._loads.num_reservations
            else []
        )

    def set_replica_load(self, load: ReservedLoad) -> None:
        """Set the load that all other replicas have reserved on a worker rank. Unknown ranks are ignored."""
        row = self._worker_table.rows.get(WorkerDpRank(load.instance, load.dp_rank))
        if row is not None:
            self._loads.set_replica_load(row, load, self._now())

    # --- display

    def explain(self, request: Request, allowed: Sequence[InstanceId]) -> list[CandidateCost]:
        """All candidates with their cost terms, cheapest first."""
        scored = self._score(request, allowed)
        chosen, _ = self._pick(request.routing, scored)
        workers, terms = scored.workers, self._cost_terms(scored)
        costs = [
            CandidateCost(
                instance=worker_rank.instance_id,
                dp_rank=worker_rank.dp_rank,
                cost=float(scored.costs[index]),
                cost_terms={name: float(values[index]) for name, values in terms.items()},
                is_saturated=bool(scored.is_saturated[index]),
                is_chosen=index == chosen,
                preference=float(scored.preference[index]),
                pace=float(scored.pace[index]),
                failure_rate=float(scored.failure_rates[index]),
                held_blocks=float(scored.overlap.device_blocks[index]),
                **{name: float(getattr(workers, name)[index]) for name in workers.__struct_fields__},
            )
            for index, worker_rank in enumerate(scored.candidates.worker_ranks)
        ]
        return sorted(costs, key=lambda each: (each.cost, each.instance, each.dp_rank))

    def _cost_terms(self, scored: _ScoredCandidates) -> CostTerms:
        terms = cost_terms(self._policy, scored.request_view, scored.workers, scored.policy_costs)
        return {
            **terms,
            "retry": scored.retry_costs - scored.policy_costs,
            "preference": scored.costs - scored.retry_costs,
        }

    def expected_output_tokens(self, request: Request) -> float:
        return self._outcomes.output_tokens(request)

    def worker_loads(self) -> list[WorkerRankLoad]:
        """Known load of every worker rank, in order."""
        loads, now = self._loads, self._now()
        return [
            WorkerRankLoad(
                instance=worker_rank.instance_id,
                dp_rank=worker_rank.dp_rank,
                requests=float(loads.requests[row]),
                decoding=float(loads.decoding[row]),
                prefill_tokens=float(loads.prefill_tokens[row]),
                blocks=float(loads.blocks[row]),
                queue_s=max(float(loads.idle_at[row]) - now, 0.0)
                + max(float(loads.replicas_idle_at[row]) - now, 0.0),
            )
            for worker_rank, row in sorted(self._worker_table.rows.items())
        ]

    # ---

    def _score(self, request: Request, allowed: Sequence[InstanceId]) -> _ScoredCandidates:
        hints = request.routing
        candidates = self._worker_table.candidates(allowed, hints.pinned_dp_rank)
        if not candidates.worker_ranks:
            raise _unavailable(hints)
        now = self._now()
        sharing = prefix_sharing(self._active_prompts.shared_depths(usable_hashes(request)))
        view = RequestView(
            request.num_context_tokens,
            request.block_size or 1,
            1.0 if request.prefill_only else self._outcomes.output_tokens(request),
            hints.weights,
            self._loads.arrivals_per_s(now) / len(candidates.worker_ranks),
        )
        overlap = self._overlaps.overlap_of(request, candidates)
        lookup_s = self._now() - now
        pace = self._outcomes.pace(candidates.row_selector, now)
        affinity = self._affinities(hints, candidates, now)
        transfer_s = _transfer_s(request, overlap, candidates)
        workers = self._workers_view(view, overlap, sharing, pace, candidates, affinity, transfer_s, now)
        costs = policy_costs = self._policy(view, workers)
        failure_rates = self._failure_rates(candidates)
        if failure_rates is not candidates.zeros:
            costs = add_retry_cost(costs, failure_rates)
        retry_costs = costs
        preference = candidates.zeros
        if hints.preferred_taints:
            preference = _taint_preference(candidates, hints.preferred_taints)
            costs = apply_preference(costs, preference)
        is_full, is_saturated, is_any = self._saturation(candidates, workers)
        return _ScoredCandidates(
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

    def _failure_rates(self, candidates: CandidateSet) -> Floats:
        """Recent failure rates; `candidates.zeros` itself if no worker has failed."""
        if not self._breakers:
            return candidates.zeros
        rates = self._breakers.failure_rates(
            [worker_rank.instance_id for worker_rank in candidates.worker_ranks]
        )
        return candidates.zeros if rates is None else np.array(rates)

    def _pick(self, hints: RoutingHints, scored: _ScoredCandidates) -> tuple[int, bool]:
        """Index of the best candidate, and whether all are saturated. Full candidates are used only if all are."""
        temperature = self._settings.temperature if hints.temperature is None else hints.temperature
        if not scored.is_any_saturated:
            return pick_index(scored.costs, self._rng, temperature), False
        is_saturated = bool(scored.is_saturated.all())
        if scored.is_full.any():
            (unfilled,) = np.nonzero(~scored.is_full)
            if len(unfilled):
                return int(unfilled[pick_index(scored.costs[unfilled], self._rng, temperature)]), is_saturated
        return pick_index(scored.costs, self._rng, temperature), is_saturated

    def _saturation(self, candidates: CandidateSet, workers: WorkersView) -> tuple[_Mask, _Mask, bool]:
        """Masks of full and of saturated candidates, and whether any is saturated."""
        max_requests, max_tokens = self._saturation_limits(candidates)
        is_full: _Mask = workers.requests >= max_requests
        is_saturated = is_full | (workers.prefill_tokens > max_tokens)
        is_any = bool(_max(is_saturated))
        if is_any:
            # Without own requests all load is reported by others, perhaps long ago: it must not block the worker.
            has_own = self._loads.has_own_requests(candidates.row_selector)
            return is_full & has_own, is_saturated & has_own, is_any
        return is_full, is_saturated, is_any

    def _saturation_limits(self, candidates: CandidateSet) -> tuple[Floats, Floats]:
        """Limits of requests and pending prompt tokens per candidate."""
        if candidates.saturation_limits is None:
            settings = self._settings
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
        loads, rows, cost_model = self._loads, candidates.row_selector, candidates.cost_model
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
        steps = self._outcomes.shared_steps(view.output_tokens)
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
            if _max(missing_blocks) <= 0.0
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
        if not sharing.hot_depth or not _max(lacks_prefix) or lacks_prefix.all():
            return candidates.zeros
        requests = self._loads.requests[candidates.row_selector]
        holder = int(np.where(lacks_prefix, np.inf, requests).argmin())
        answers_s = (
            view.output_tokens * step_s / (1.0 - self._loads.prefill_share(candidates.row_selector, now))
        )
        saved_s = answers_s[holder] - answers_s
        saved_s += 2.0 * slowdown_s[holder] * (requests[holder] - requests)
        return np.where(lacks_prefix, 0.5 * sharing.reuse * np.maximum(saved_s, 0.0), 0.0)

    def _affinities(self, hints: RoutingHints, candidates: CandidateSet, now: float) -> Floats:
        last_served = self._affinity.last_served(hints, now)
        index = None if last_served is None else candidates.index_of.get(last_served[0])
        if last_served is None or index is None:
            return candidates.zeros
        affinity = np.zeros(len(candidates.worker_ranks))
        affinity[index] = last_served[1]
        return affinity

    def _add_row(self, row: int) -> None:
        self._pending_blocks.add_row(row)
        self._outcomes.add_row(row)

    def _drop_row(self, row: int) -> None:
        self._pending_blocks.drop_row(row)
        self._active_prompts.drop_row(row)
        self._outcomes.drop_row(row)

    def _end_prefill(self, reservation_id: int, reservation: LoadReservation | None) -> None:
        """Remove the pending blocks of a prompt that is computed or cancelled."""
        if reservation is not None:
            self._pending_blocks.remove_prompt(reservation.row, reservation_id)


def _max(values: npt.NDArray[Any]) -> Any:
    """Maximum of a short array, at half the cost of `max` and `any`."""
    return values[values.argmax()]


def _shadow_verdict(shadow: ShadowPolicy, scored: _ScoredCandidates, chosen: int) -> ShadowVerdict | None:
    unavailable = scored.is_full if scored.is_full.any() and not scored.is_full.all() else None
    return shadow.compare(scored.request_view, scored.workers, scored.preference, unavailable, chosen)


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
