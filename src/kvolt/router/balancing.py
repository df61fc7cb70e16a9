"""Routers without a cost model: round-robin, least loaded, power of two choices, random, and pinned.

Those that balance load count this process's own requests only. They count at once, where a worker report would be late;
other routers of the same workers are not seen. The predicted time of a decision is that of its prompt alone.
"""

from __future__ import annotations

import random

import numpy as np

from kvolt.core.delta import Usage
from kvolt.core.endpoints import Instance
from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import CandidateFilter
from kvolt.router.policy.cost_model import CostModel
from kvolt.router.port import Decision
from kvolt.router.registrations import Registrations
from kvolt.runtime.endpoint.client import EndpointClient

_ZERO = np.zeros(1)


class PromptTimes:
    """Predicted prefill times, for routers that track no loads.

    The cost model is that of the KV-aware routers. Cached blocks and other requests are unknown here.
    """

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations
        self._version: int | None = None
        self._models: dict[InstanceId, CostModel] = {}
        """Cost models of single workers, until the registrations change."""

    def predict_ms(self, instance_id: InstanceId, request: Request) -> float | None:
        """Time to compute the request's prompt and prior tokens at an idle worker. None if the worker has registered
        no step model, or gets the KV from a prefill worker."""
        if request.handoff is not None or request.rendezvous is not None:
            return None
        model = self._model_of(instance_id)
        if not model.has_own_model[0]:
            return None
        num_tokens = request.num_context_tokens
        return 1e3 * float(model.prefill_s(num_tokens, np.array([float(num_tokens)]), _ZERO, _ZERO)[0])

    def _model_of(self, instance_id: InstanceId) -> CostModel:
        infos = self._registrations.infos()
        if self._version != self._registrations.version:
            self._version = self._registrations.version
            self._models.clear()
        model = self._models.get(instance_id)
        if model is None:
            model = self._models[instance_id] = CostModel([infos.get(instance_id)])
        return model


class RoundRobinRouter:
    """Round-robin over the candidates. Respects pins and LoRA adapters and ignores everything else about the request.
    A Router, like its subclasses."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self._client = client
        self._role = role
        self._turn = 0
        self.candidate_filter = CandidateFilter(client, role, breakers)
        self._prompt_times = PromptTimes(self.candidate_filter.registrations)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self.candidate_filter.is_unrestricted(request, excluded):
            return self._decide(request, self._client.pick_round_robin())
        candidates = self.candidate_filter.candidates(request, excluded)
        self._turn += 1
        return self._decide(request, candidates[self._turn % len(candidates)])

    def _decide(self, request: Request, chosen: Instance, dp_rank: int | None = None) -> Decision:
        attempt = self.candidate_filter.breakers.start_attempt(chosen.id)
        predicted_ms = self._prompt_times.predict_ms(chosen.id, request)
        return Decision(chosen, predicted_ms=predicted_ms, dp_rank=dp_rank, attempt=attempt)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self.candidate_filter.breakers.mark_first_token(decision.instance.id, decision.attempt)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.candidate_filter.end_attempt(decision.instance.id, decision.attempt, outcome)

    async def close(self) -> None:
        """Holds no resources."""


class DirectRouter(RoundRobinRouter):
    """Routes to the pinned instance, for gateways that choose workers themselves. Raises InvalidRequest without a pin.

    No other instance may take a pinned request; the breakers serve metrics only.
    """

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._role not in request.routing.pins:
            raise InvalidRequest(
                "the direct router needs a worker in the request, for example in the header x-kvolt-worker-instance-id",
                param="nvext.backend_instance_id",
            )
        (instance,) = self.candidate_filter.candidates(request, excluded)
        return self._decide(request, instance, request.routing.pinned_dp_rank)


class LeastLoadedRouter(RoundRobinRouter):
    """Fewest requests in flight; round-robin among equals. A request counts the same before and after its first
    token."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        super().__init__(client, role, breakers)
        self._in_flight: dict[InstanceId, int] = {}
        """Only instances with requests, so that removed ones leave nothing behind."""

    @property
    def num_in_flight(self) -> dict[InstanceId, int]:
        """Decisions not released yet, by instance."""
        return dict(self._in_flight)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        chosen = self._choose(self.candidate_filter.candidates(request, excluded))
        self._in_flight[chosen.id] = self._count(chosen) + 1
        return self._decide(request, chosen)

    def _choose(self, candidates: list[Instance]) -> Instance:
        self._turn += 1
        start = self._turn % len(candidates)
        return min(candidates[start:] + candidates[:start], key=self._count)

    def _count(self, instance: Instance) -> int:
        return self._in_flight.get(instance.id, 0)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        super().release(decision, usage, outcome)
        num_requests = self._in_flight.pop(decision.instance.id, 0) - 1
        if num_requests > 0:
            self._in_flight[decision.instance.id] = num_requests


class PowerOfTwoRouter(LeastLoadedRouter):
    """The less loaded of two random candidates: independent routers choose different ones."""

    def __init__(
        self,
        client: EndpointClient,
        rng: random.Random,
        role: Role = Role.AGGREGATED,
        breakers: Breakers | None = None,
    ) -> None:
        super().__init__(client, role, breakers)
        self._rng = rng

    def _choose(self, candidates: list[Instance]) -> Instance:
        return min(self._rng.sample(candidates, min(2, len(candidates))), key=self._count)


class RandomRouter(PowerOfTwoRouter):
    """A random candidate."""

    def _choose(self, candidates: list[Instance]) -> Instance:
        return self._rng.choice(candidates)
