"""Selector: chooses the worker rank with the lowest cost for a request. Pure.

The routing decision without a runtime, usable from a process, a service or another program. `set_workers` defines the
workers, each request names the workers that may take it, a prefix index is fed by the caller, time and randomness are
injected. `choose` changes nothing; a reservation counts until it is released.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.load import LoadReport
from kvolt.core.request import Request
from kvolt.router.breaker import Breakers
from kvolt.router.choice import CandidateCost, WorkerChoice
from kvolt.router.index.active_prompts import ActivePrompts
from kvolt.router.index.pending_blocks import PendingBlocks
from kvolt.router.index.prefix_index import PrefixIndex
from kvolt.router.policy.affinity import SessionAffinity
from kvolt.router.policy.load import LoadReservation, WorkerLoads
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.shadow import ShadowPolicy, ShadowVerdict
from kvolt.router.selection.forecast import Forecast
from kvolt.router.selection.learning import OutcomeTracker, RequestObserver
from kvolt.router.selection.overlap import OverlapFinder
from kvolt.router.selection.roster import WorkerTable
from kvolt.router.selection.scoring import ScoredCandidates, Scorer, max_of
from kvolt.router.stats import RouterStats
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank, WorkerRankLoad
from kvolt.runtime.config.router_settings import RouterSettings


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
        self._now = now
        settings = settings or RouterSettings()
        self._loads = WorkerLoads()
        self._pending_blocks = PendingBlocks()
        self._active_prompts = ActivePrompts()
        self._overlaps = OverlapFinder(prefix_index, self._pending_blocks, settings)
        self._outcomes = OutcomeTracker(observer, settings.correct_times)
        self._worker_table = WorkerTable(self._loads, self._add_row, self._drop_row, self._outcomes.drop_row)
        self._affinity = SessionAffinity(settings.affinity_half_life_s, settings.affinity_sessions)
        self._in_flight: dict[int, WorkerChoice] = {}
        self._tiered_workers: frozenset[InstanceId] = frozenset()
        self._scorer = Scorer(
            policy,
            now,
            rng,
            settings,
            self._worker_table,
            self._loads,
            self._active_prompts,
            self._overlaps,
            self._outcomes,
            self._affinity,
            breakers,
        )
        self.shadow: ShadowPolicy | None = None
        """Second policy that is evaluated but decides nothing."""

    @property
    def num_in_flight(self) -> int:
        """Reservations not released yet."""
        return self._loads.num_reservations

    @property
    def stats(self) -> RouterStats:
        return self._outcomes.stats

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
    ) -> WorkerChoice:
        """Choose the best worker rank of the allowed workers. Reserves nothing. Raises Unavailable if there
        is none.

        `kv_sources` are worker ranks that share KV with the chosen one. Pass the same tuples while they do not
        change: the candidate set is cached by identity.
        """
        started_at = self._now()
        scored = self._scorer.score(request, allowed)
        index, is_saturated = self._scorer.pick(request.routing, scored)
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
        choice = WorkerChoice(
            worker_rank,
            overlap,
            float(workers.queue_s[index]),
            prefill_s,
            is_saturated,
            request,
            view.prompt_tokens - overlap * view.block_size,
            view.num_blocks + view.output_tokens / view.block_size,
            int(scored.overlap.device_blocks[index]),
            int(max_of(workers.overlap_blocks)),
            source,
            source_blocks,
            worker_rank.instance_id in self._tiered_workers,
            prefill_s / float(scored.pace[index]),
            float(workers.room_s[index]),
            0.0 if request.prefill_only else float(workers.transfer_s[index]),
            float(workers.step_s[index]),
            float(scored.candidates.max_batch_tokens[index]),
            None if self.shadow is None else _shadow_verdict(self.shadow, scored, index),
        )
        self.stats.record_overhead(scored.lookup_s, self._now() - started_at)
        return choice

    def forecast(self, request: Request, allowed: Sequence[InstanceId]) -> Forecast:
        """Predict the outcome at the best worker rank. Reserves nothing."""
        scored = self._scorer.score(request, allowed)
        index, _ = self._scorer.pick(request.routing, scored)
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

    def reserve(self, choice: WorkerChoice) -> int:
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
            choice.step_s,
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

    def find_choice(self, reservation_id: int) -> WorkerChoice | None:
        """The choice of a reservation that is not released yet."""
        return self._in_flight.get(reservation_id)

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
        scored = self._scorer.score(request, allowed)
        chosen, _ = self._scorer.pick(request.routing, scored)
        workers, terms = scored.workers, self._scorer.cost_terms(scored)
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
                has_step_model=scored.candidates.cost_model.has_own_model[index],
                **{name: float(getattr(workers, name)[index]) for name in workers.__struct_fields__},
            )
            for index, worker_rank in enumerate(scored.candidates.worker_ranks)
        ]
        return sorted(costs, key=lambda each: (each.cost, each.instance, each.dp_rank))

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


def _shadow_verdict(shadow: ShadowPolicy, scored: ScoredCandidates, chosen: int) -> ShadowVerdict | None:
    unavailable = scored.is_full if scored.is_full.any() and not scored.is_full.all() else None
    return shadow.compare(scored.request_view, scored.workers, scored.preference, unavailable, chosen)
