"""Least-loaded routing: who has the fewest requests under way, as far as this process has sent them.

Counts its own decisions that are not over, and nothing that workers tell: what was sent a moment ago counts at once,
where a report would come too late. Other processes that send to the same workers are not seen.
"""

from __future__ import annotations

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.eligible import Eligible
from kvolt.router.port import Decision
from kvolt.runtime.client import EndpointClient


class LeastLoadedRouter:
    """The candidate with the fewest; of several such each in turn. Pins and adapters as ever."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._eligible = Eligible(client, role)
        self._turn = 0
        self._under_way: dict[InstanceId, int] = {}
        """Of those that have any: what is gone and done leaves nothing behind."""

    @property
    def num_under_way(self) -> dict[InstanceId, int]:
        """Decisions that are not over, by instance."""
        return dict(self._under_way)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        left = self._eligible.of(request, excluded)
        self._turn += 1
        start = self._turn % len(left)
        count = self._under_way.get
        chosen = min(left[start:] + left[:start], key=lambda instance: count(instance.id, 0))
        self._under_way[chosen.id] = count(chosen.id, 0) + 1
        return Decision(chosen)

    def free(self, decision: Decision) -> None:
        instance_id = decision.instance.id
        number = self._under_way.pop(instance_id, 0) - 1
        if number > 0:
            self._under_way[instance_id] = number
