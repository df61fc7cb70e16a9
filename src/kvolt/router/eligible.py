"""Who may take a request at all: neither failed it, nor lacks its adapter, nor is passed over by a pin.

What every router begins with; which of them it takes is its own affair.
"""

from __future__ import annotations

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role
from kvolt.router.adapters import Adapters
from kvolt.runtime.address import Instance
from kvolt.runtime.client import EndpointClient


class Eligible:
    """Of one endpoint, for as long as its client lives."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._client = client
        self._role = role
        self._adapters = Adapters(client)

    def is_anyone(self, request: Request, excluded: frozenset[InstanceId]) -> bool:
        """Whether every candidate will do."""
        return not excluded and not request.lora and self._role not in request.routing.pins

    def of(self, request: Request, excluded: frozenset[InstanceId]) -> list[Instance]:
        """At least one, in order of id; Unavailable says why there is none."""
        pinned = request.routing.pins.get(self._role)
        lora = request.lora
        able = self._adapters.holders(lora) if lora else self._client.candidates()
        left = [instance for instance in able if instance.id not in excluded]
        if pinned is not None:
            left = [instance for instance in left if instance.id == pinned]
        if not left:
            raise self._nobody(pinned, lora, excluded)
        return left

    def _nobody(
        self, pinned: InstanceId | None, lora: str | None, excluded: frozenset[InstanceId]
    ) -> Unavailable:
        having = f" with the adapter {lora!r}" if lora else ""
        if pinned is not None:
            message, reason = f"the pinned instance {pinned}{having} cannot be reached", "pin"
        elif lora and not self._adapters.holders(lora):
            message, reason = f"no instance that can be reached has the adapter {lora!r}", "no_adapter"
        elif not excluded and not self._client.candidates():
            message = f"no instance of {self._client.endpoint} can be reached"
            reason = "none_reachable" if self._client.instances() else "no_instances"
        else:
            message, reason = f"another instance{having} cannot be reached", "none_left"
        return Unavailable(message, endpoint=str(self._client.endpoint), reason=reason)
