"""The router port: which instance gets a request."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, Role
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
        """Any instance but the excluded ones, which have failed this request already.

        Unavailable when no instance can take the request; Overloaded when too many wait.
        """
        ...


class RoundRobinRouter:
    """Each candidate in turn. A pin for its role is obeyed; nothing else about the request matters."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._client = client
        self._role = role
        self._turn = 0

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        instance_id = request.routing.pins.get(self._role)
        if instance_id is None and not excluded:
            return Decision(self._client.round_robin())
        left = [instance for instance in self._client.candidates() if instance.id not in excluded]
        if instance_id is not None:
            left = [instance for instance in left if instance.id == instance_id]
        if not left:
            reason = "pin" if instance_id is not None else "none_left"
            which = f"the pinned instance {instance_id}" if instance_id is not None else "another instance"
            raise Unavailable(
                f"{which} cannot be reached", endpoint=str(self._client.endpoint), reason=reason
            )
        self._turn += 1
        return Decision(left[self._turn % len(left)])
