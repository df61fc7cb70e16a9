"""DirectRouter: obeys the pin of the caller, for gateways that choose workers themselves."""

from __future__ import annotations

from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import CandidateFilter
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.client import EndpointClient


class DirectRouter:
    """Routes to the pinned instance. Raises InvalidRequest without a pin. A Router."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self.candidate_filter = CandidateFilter(client, role, breakers)
        self._role = role

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._role not in request.routing.pins:
            raise InvalidRequest(
                "the direct router needs a worker in the request, for example in the header x-kvolt-worker-instance-id",
                param="nvext.backend_instance_id",
            )
        (instance,) = self.candidate_filter.candidates(request, excluded)
        attempt = self.candidate_filter.breakers.start_attempt(instance.id)
        return Decision(instance, dp_rank=request.routing.pinned_dp_rank, attempt=attempt)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self.candidate_filter.breakers.mark_first_token(decision.instance.id, decision.attempt)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """No other instance may take a pinned request; the breaker serves metrics only."""
        self.candidate_filter.end_attempt(decision.instance.id, decision.attempt, outcome)

    async def close(self) -> None:
        """Holds no resources."""
