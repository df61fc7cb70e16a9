"""The router port: which instance gets a request."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.adapters import Adapters
from kvolt.runtime.address import Instance
from kvolt.runtime.client import EndpointClient


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and what the router expects of it."""

    instance: Instance
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()


class Router(Protocol):
    """The port. Asynchronous, since a router may let a request wait for its turn or live elsewhere."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Any instance but the excluded ones, which have failed this request already, and with its adapter.

        Unavailable when no instance can take the request; Overloaded when too many wait.
        """
        ...


class RoundRobinRouter:
    """Each candidate in turn. A pin for its role is obeyed, and who lacks the request's adapter is left out;
    nothing else about the request matters."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._client = client
        self._role = role
        self._turn = 0
        self._adapters = Adapters(client)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        instance_id = request.routing.pins.get(self._role)
        lora = request.lora
        if instance_id is None and not excluded and not lora:
            return Decision(self._client.round_robin())
        able = self._adapters.holders(lora) if lora else self._client.candidates()
        left = [instance for instance in able if instance.id not in excluded]
        if instance_id is not None:
            left = [instance for instance in left if instance.id == instance_id]
        if not left:
            raise self._nobody(instance_id, lora)
        self._turn += 1
        return Decision(left[self._turn % len(left)])

    def _nobody(self, pinned: InstanceId | None, lora: str | None) -> Unavailable:
        having = f" with the adapter {lora!r}" if lora else ""
        if pinned is not None:
            message, reason = f"the pinned instance {pinned}{having} cannot be reached", "pin"
        elif lora and not self._adapters.holders(lora):
            message, reason = f"no instance that can be reached has the adapter {lora!r}", "no_adapter"
        else:
            message, reason = f"another instance{having} cannot be reached", "none_left"
        return Unavailable(message, endpoint=str(self._client.endpoint), reason=reason)
