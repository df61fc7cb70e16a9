"""The router port: which instance gets a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.breaker import Attempt, Breakers, Outcome
from kvolt.router.filters import Eligible
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime


class Recall:
    """How a router moves a request that has not begun: who carries the request puts in how."""

    __slots__ = ("move",)

    def __init__(self) -> None:
        self.move: Callable[[Decision], bool] | None = None
        """Told where else it could go, already booked there; whether it tries to. If not, or if it is too late, that is
        given to `free`, as everything that is booked. None while it cannot be moved. Must not raise."""


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes, and what the router expects of it."""

    instance: Instance
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    booking: int = 0
    """For the router that made it: what it counts as under way."""
    dp_rank: int | None = None
    """Which data-parallel rank of the instance; None where the instance may choose."""
    recall: Recall | None = None
    """Of a router that may want the request back before it has begun."""
    attempt: Attempt | None = None
    """For the router that made it: what its breaker of the instance keeps of it."""


_AS_THEY_COME = RouterSettings()


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What a router may need: the workers it chooses from, and the process that it lives in."""

    client: EndpointClient
    runtime: Runtime
    block_size: int
    """Of the hashes that requests come with."""
    settings: RouterSettings = _AS_THEY_COME
    role: Role = Role.AGGREGATED
    """Of these workers: a request may pin one of each role."""


class Router(Protocol):
    """The port. Asynchronous, since a router may let a request wait for its turn or live elsewhere."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Any instance but the excluded ones, which have failed this request already, and with its adapter.

        Unavailable when no instance can take the request; Overloaded when too many wait. What it returns is booked
        at that instance until it is given to `free`; when it raises, or is cancelled, nothing is.
        """
        ...

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        """The first token of the answer has come, and how much of the prompt was not computed, if the worker says.

        At most once for each, and before `free`. Must not raise.
        """
        ...

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """What came of this decision is over: answered, failed, cancelled or never begun. Once for each.

        With the worker's own counts where it was answered to its end, and with what that says about the worker. Must
        not raise.
        """
        ...

    async def close(self) -> None:
        """It is asked no more."""
        ...


class RoundRobinRouter:
    """Each candidate in turn. A pin for its role is obeyed, and who lacks the request's adapter is left out;
    nothing else about the request matters."""

    def __init__(
        self, client: EndpointClient, role: Role = Role.AGGREGATED, breakers: Breakers | None = None
    ) -> None:
        self._client = client
        self.eligible = Eligible(client, role, breakers)
        self._turn = 0

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self.eligible.is_anyone(request, excluded):
            chosen = self._client.round_robin()
        else:
            left = self.eligible.of(request, excluded)
            self._turn += 1
            chosen = left[self._turn % len(left)]
        return Decision(chosen, attempt=self.eligible.breakers.send(chosen.id))

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        self.eligible.breakers.first_token(decision.instance.id, decision.attempt)

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.eligible.end_attempt(decision.instance.id, decision.attempt, outcome)

    async def close(self) -> None:
        """It has nothing of its own."""
