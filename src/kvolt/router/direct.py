"""DirectRouter: who asks says who answers. For callers that decide by themselves, such as a gateway."""

from __future__ import annotations

from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.breaker import Breakers, Outcome
from kvolt.router.filters import Eligible
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.client import EndpointClient


class DirectRouter:
    """To the pinned instance; InvalidRequest for a request without a pin. A Router."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self.eligible = Eligible(client, role, breakers)
        self._role = role

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._role not in request.routing.pins:
            raise InvalidRequest(
                "this router takes no decisions: name the worker, for example in the header x-kvolt-worker-instance-id",
                param="nvext.backend_instance_id",
            )
        (instance,) = self.eligible.of(request, excluded)
        attempt = self.eligible.breakers.send(instance.id)
        return Decision(instance, dp_rank=request.routing.pinned_dp_rank, attempt=attempt)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        self.eligible.breakers.first_token(decision.instance.id, decision.attempt)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """No other instance may take what is pinned; the breaker is kept for metrics."""
        self.eligible.end_attempt(decision.instance.id, decision.attempt, outcome)

    async def close(self) -> None:
        """It has nothing of its own."""
