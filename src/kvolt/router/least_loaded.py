"""Load-based routers without a cost model: least loaded, power of two choices, random.

Count this process's own requests only. They count at once, where a worker report would be late; other routers of the
same workers are not seen.
"""

from __future__ import annotations

import random

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import CandidateFilter
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient


class LeastLoadedRouter:
    """Fewest requests in flight; round-robin among equals. Respects pins and adapters."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self.candidate_filter = CandidateFilter(client, role, breakers)
        self._turn = 0
        self._in_flight: dict[InstanceId, int] = {}
        """Only instances with requests, so that removed ones leave nothing behind."""

    @property
    def num_in_flight(self) -> dict[InstanceId, int]:
        """Decisions not released yet, by instance."""
        return dict(self._in_flight)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        chosen = self._choose(self.candidate_filter.candidates(request, excluded))
        self._in_flight[chosen.id] = self._count(chosen) + 1
        return Decision(chosen, attempt=self.candidate_filter.breakers.start_attempt(chosen.id))

    def _choose(self, candidates: list[Instance]) -> Instance:
        self._turn += 1
        start = self._turn % len(candidates)
        return min(candidates[start:] + candidates[:start], key=self._count)

    def _count(self, instance: Instance) -> int:
        return self._in_flight.get(instance.id, 0)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        """A request counts the same before and after its first token."""
        self.candidate_filter.breakers.mark_first_token(decision.instance.id, decision.attempt)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        instance_id = decision.instance.id
        self.candidate_filter.end_attempt(instance_id, decision.attempt, outcome)
        num_requests = self._in_flight.pop(instance_id, 0) - 1
        if num_requests > 0:
            self._in_flight[instance_id] = num_requests

    async def close(self) -> None:
        """Holds no resources."""


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


class RandomRouter(LeastLoadedRouter):
    """A random candidate."""

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
        return self._rng.choice(candidates)
