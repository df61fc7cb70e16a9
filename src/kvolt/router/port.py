"""The router port: which instance gets a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.eligible import Eligible
from kvolt.runtime.address import Instance
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.runtime import Runtime


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and what the router expects of it."""

    instance: Instance
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    booking: int = 0
    """For the router that made it: what it counts as under way."""


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router may need: the workers it chooses from, and the process that it lives in."""

    client: EndpointClient
    runtime: Runtime
    block_size: int
    """Of the hashes that requests come with."""


class Router(Protocol):
    """The port. Asynchronous, since a router may let a request wait for its turn or live elsewhere."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Any instance but the excluded ones, which have failed this request already, and with its adapter.

        Unavailable when no instance can take the request; Overloaded when too many wait. What it returns is booked
        at that instance until it is given to `free`; when it raises, or is cancelled, nothing is.
        """
        ...

    def begun(self, decision: Decision) -> None:
        """The first token of the answer has come. At most once for each, and before `free`. Must not raise."""
        ...

    def free(self, decision: Decision) -> None:
        """What came of this decision is over: answered, failed, cancelled or never begun. Once for each.

        Must not raise.
        """
        ...

    async def close(self) -> None:
        """It is asked no more."""
        ...


class RoundRobinRouter:
    """Each candidate in turn. A pin for its role is obeyed, and who lacks the request's adapter is left out;
    nothing else about the request matters."""

    def __init__(self, client: EndpointClient, role: Role = Role.AGGREGATED) -> None:
        self._client = client
        self._eligible = Eligible(client, role)
        self._turn = 0

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._eligible.is_anyone(request, excluded):
            return Decision(self._client.round_robin())
        left = self._eligible.of(request, excluded)
        self._turn += 1
        return Decision(left[self._turn % len(left)])

    def begun(self, decision: Decision) -> None:
        """Who is busy does not matter here."""

    def free(self, decision: Decision) -> None:
        """Nothing was booked."""

    async def close(self) -> None:
        """It has nothing of its own."""
