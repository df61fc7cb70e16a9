"""DirectRouter: who asks says who answers. For callers that decide by themselves, such as a gateway."""

from __future__ import annotations

from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.eligible import Eligible
from kvolt.router.port import Decision
from kvolt.runtime.client import EndpointClient


class DirectRouter:
    """To the pinned instance; InvalidRequest for a request without a pin. A Router."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._eligible = Eligible(client, role)
        self._role = role

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._role not in request.routing.pins:
            raise InvalidRequest(
                "this router takes no decisions: name the worker, for example in the header x-kvolt-worker-instance-id",
                param="nvext.backend_instance_id",
            )
        (instance,) = self._eligible.of(request, excluded)
        return Decision(instance, dp_rank=request.routing.pinned_dp_rank)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        """Who is busy does not matter here."""

    def free(self, decision: Decision, usage: Usage | None) -> None:
        """Nothing was booked."""

    async def close(self) -> None:
        """It has nothing of its own."""
