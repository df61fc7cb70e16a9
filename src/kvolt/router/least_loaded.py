"""Routing by what is under way, as far as this process has sent it: the least loaded, the less loaded of two, or any.

Counts its own decisions that are not over, and nothing that workers tell: what was sent a moment ago counts at once,
where a report would come too late. Other processes that send to the same workers are not seen.
"""

from __future__ import annotations

import random

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import Eligible
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient


class LeastLoadedRouter:
    """The candidate with the fewest; of several such each in turn. Pins and adapters as ever."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self.eligible = Eligible(client, role, breakers)
        self._turn = 0
        self._under_way: dict[InstanceId, int] = {}
        """Of those that have any: what is gone and done leaves nothing behind."""

    @property
    def num_under_way(self) -> dict[InstanceId, int]:
        """Decisions that are not over, by instance."""
        return dict(self._under_way)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        chosen = self._choose(self.eligible.of(request, excluded))
        self._under_way[chosen.id] = self._count(chosen) + 1
        return Decision(chosen, attempt=self.eligible.breakers.send(chosen.id))

    def _choose(self, left: list[Instance]) -> Instance:
        self._turn += 1
        start = self._turn % len(left)
        return min(left[start:] + left[:start], key=self._count)

    def _count(self, instance: Instance) -> int:
        return self._under_way.get(instance.id, 0)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        """A request counts the same before and after."""
        self.eligible.breakers.first_token(decision.instance.id, decision.attempt)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        instance_id = decision.instance.id
        self.eligible.end_attempt(instance_id, decision.attempt, outcome)
        number = self._under_way.pop(instance_id, 0) - 1
        if number > 0:
            self._under_way[instance_id] = number

    async def close(self) -> None:
        """It has nothing of its own."""


class PowerOfTwoRouter(LeastLoadedRouter):
    """The less loaded of two that are drawn: several routers that do not know each other choose different ones."""

    def __init__(
        self,
        client: EndpointClient,
        rng: random.Random,
        role: Role = Role.AGGREGATED,
        breakers: Breakers | None = None,
    ) -> None:
        super().__init__(client, role, breakers)
        self._rng = rng

    def _choose(self, left: list[Instance]) -> Instance:
        return min(self._rng.sample(left, min(2, len(left))), key=self._count)


class RandomRouter(LeastLoadedRouter):
    """Any of them."""

    def __init__(
        self,
        client: EndpointClient,
        rng: random.Random,
        role: Role = Role.AGGREGATED,
        breakers: Breakers | None = None,
    ) -> None:
        super().__init__(client, role, breakers)
        self._rng = rng

    def _choose(self, left: list[Instance]) -> Instance:
        return self._rng.choice(left)
