"""KvRouter: a Selector over the workers of an endpoint.

Tracks the registered workers, filters the candidates and implements the Router port. Own reservations count at once;
worker reports add external load. Routing awaits nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.load import LoadReport
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.choice import CandidateCost, WorkerChoice
from kvolt.router.filters import CandidateFilter
from kvolt.router.index.prefix_index import PrefixIndex
from kvolt.router.policy.policy import Policy
from kvolt.router.port import Decision
from kvolt.router.selection.forecast import Forecast
from kvolt.router.selection.learning import RequestObserver
from kvolt.router.selection.selector import Selector
from kvolt.router.stats import RouterStats
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank, WorkerRankLoad, ranks_of
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.client import EndpointClient


class KvRouter:
    """A Router; see the module."""

    def __init__(
        self,
        client: EndpointClient,
        prefix_index: PrefixIndex,
        policy: Policy,
        now: Callable[[], float],
        rng: random.Random,
        settings: RouterSettings | None = None,
        role: Role = Role.AGGREGATED,
        observer: RequestObserver | None = None,
    ) -> None:
        self._client = client
        self.candidate_filter = CandidateFilter(client, role, Breakers(now))
        self._known_version: int | None = None
        self._kv_sources: tuple[WorkerDpRank, ...] = ()
        """Worker ranks that share their KV with peers."""
        self._reachable_ids_cache: tuple[list[Instance], tuple[InstanceId, ...]] | None = None
        self.on_capacity_freed: Callable[[], None] = lambda: None
        """Called when capacity may have become free other than by `mark_first_token` or `release`. Set by a queue."""
        self.on_workers_changed: Callable[[], None] = lambda: None
        """Called before that when `reachable_ids` may have changed. Set by a queue."""
        client.on_change(self._on_change)
        self.selector = Selector(
            prefix_index, policy, now, rng, settings, observer, self.candidate_filter.breakers
        )

    @property
    def endpoint(self) -> EndpointAddress:
        return self._client.endpoint

    @property
    def stats(self) -> RouterStats:
        return self.selector.stats

    @property
    def num_in_flight(self) -> int:
        """Decisions not released yet."""
        return self.selector.num_in_flight

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Route regardless of load. Queues use `try_route`."""
        return self._to_decision(self._choose(request, excluded))

    def try_route(
        self,
        request: Request,
        excluded: frozenset[InstanceId] = frozenset(),
        accepts: Callable[[WorkerChoice], bool] = lambda choice: True,
    ) -> Decision | None:
        """Route, or return None if all candidates are saturated or the choice is not accepted. Raises Unavailable
        like `route`."""
        choice = self._choose(request, excluded)
        return None if choice.is_saturated or not accepts(choice) else self._to_decision(choice)

    def find_choice(self, decision: Decision) -> WorkerChoice | None:
        """What the decision was made from; None once it is released."""
        return self.selector.find_choice(decision.reservation_id)

    def predict_ttft_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        """Predicted TTFT if the request were routed now; None if `try_route` would return None. Reserves nothing."""
        choice = self._choose(request, excluded)
        return None if choice.is_saturated else choice.predicted_s

    def forecast(self, request: Request) -> Forecast:
        candidates_of = request
        if self._client.has_fallback:  # prefill workers: if none can take the prompt, there is no forecast
            candidates_of = msgspec.structs.replace(request, prefill_only=True)
        return self.selector.forecast(request, self._candidates(candidates_of, frozenset()))

    def queue_s(self, decision: Decision) -> float:
        """Predicted time until all prompts sent to the decision's worker rank are computed, later ones included. Once
        that time has passed: the predicted duration of the prompts still pending."""
        return self.selector.queue_s(decision.reservation_id)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self.candidate_filter.breakers.mark_first_token(decision.instance.id, decision.attempt)
        self.selector.mark_first_token(decision.reservation_id, cached_tokens)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.candidate_filter.end_attempt(decision.instance.id, decision.attempt, outcome)
        self.selector.release(decision.reservation_id, usage)

    async def close(self) -> None:
        """The prefix index belongs to the caller."""

    def on_report(self, report: LoadReport) -> None:
        self._refresh_workers()
        self.selector.on_report(report)
        self.on_capacity_freed()

    def _on_change(self) -> None:
        self.on_workers_changed()
        self.on_capacity_freed()

    def reachable_ids(self) -> Sequence[InstanceId]:
        """Ids of all reachable workers; the same tuple until the set changes."""
        reachable = self._client.candidates()
        if self._reachable_ids_cache is None or self._reachable_ids_cache[0] is not reachable:
            self._reachable_ids_cache = (reachable, _ids(reachable))
        return self._reachable_ids_cache[1]

    def own_loads(self) -> Sequence[ReservedLoad]:
        """Loads reserved by this router, for gossip."""
        return self.selector.own_loads()

    def set_replica_load(self, load: ReservedLoad) -> None:
        """Set the load that all other routers have reserved on a worker rank."""
        self._refresh_workers()
        self.selector.set_replica_load(load)
        self.on_capacity_freed()

    def explain(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> list[CandidateCost]:
        """All candidates with their cost terms, cheapest first."""
        return self.selector.explain(request, self._candidates(request, excluded))

    def excluded_workers(self, request: Request) -> list[tuple[Instance, str]]:
        """Registered workers that cannot take the request, with reasons for display."""
        reasons = [
            (each, self.candidate_filter.exclusion_reason(each, request)) for each in self._client.instances()
        ]
        return [(instance, why) for instance, why in reasons if why is not None]

    def index_source(self, instance_id: InstanceId) -> str:
        """Source of the index entries of a worker, for display."""
        return "index"

    def process_of(self, instance_id: InstanceId) -> str:
        """Process name of a registered worker."""
        return self._client.get_instance(instance_id).process

    def worker_loads(self) -> list[WorkerRankLoad]:
        self._refresh_workers()
        return self.selector.worker_loads()

    # ---

    def _choose(self, request: Request, excluded: frozenset[InstanceId]) -> WorkerChoice:
        candidates = self._candidates(request, excluded)
        sources = self._kv_sources
        if excluded and sources:  # a worker that failed this request is no KV source either
            sources = tuple(each for each in sources if each.instance_id not in excluded)
        return self.selector.choose(request, candidates, sources)

    def _to_decision(self, choice: WorkerChoice) -> Decision:
        is_query = choice.request.routing.query_only
        instance_id, dp_rank = choice.worker_rank
        infos = self.candidate_filter.registrations.infos()
        has_several = len(ranks_of(infos.get(instance_id))) > 1
        return Decision(
            self._client.get_instance(instance_id),
            choice.overlap_blocks,
            choice.predicted_s * 1e3,
            _sources(choice, infos),
            reservation_id=0 if is_query else self.selector.reserve(choice),
            dp_rank=dp_rank if has_several else None,
            attempt=None if is_query else self.candidate_filter.breakers.start_attempt(instance_id),
        )

    def _candidates(self, request: Request, excluded: frozenset[InstanceId]) -> Sequence[InstanceId]:
        self._refresh_workers()
        if self.candidate_filter.is_unrestricted(request, excluded):
            reachable = self.reachable_ids()
            if reachable:
                return reachable
        return _ids(self.candidate_filter.candidates(request, excluded))

    def _refresh_workers(self) -> None:
        registered = self.candidate_filter.registrations
        if registered.version != self._known_version:
            self._known_version = registered.version
            infos = registered.infos()
            self.selector.set_workers(infos)
            self._kv_sources = tuple(
                WorkerDpRank(instance_id, dp_rank)
                for instance_id, info in infos.items()
                if info is not None and info.shares_kv
                for dp_rank in ranks_of(info)
            )


def _sources(choice: WorkerChoice, infos: Mapping[InstanceId, EngineInfo | None]) -> tuple[KvSource, ...]:
    """The peer that holds more of the prompt than the chosen worker, if that worker shares KV."""
    info = infos.get(choice.worker_rank.instance_id)
    if choice.source is None or info is None or not info.shares_kv:
        return ()
    source = choice.source
    return (KvSource(source.instance_id, Tier.HOST, choice.source_blocks, source.dp_rank),)


def _ids(instances: Sequence[Instance]) -> tuple[InstanceId, ...]:
    return tuple(instance.id for instance in instances)
