"""Router port: chooses an instance for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.endpoints import Instance
from kvolt.core.ids import InstanceId
from kvolt.core.request import KvSource, Request, Role
from kvolt.router.breaker import Attempt, Outcome
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime


class WithdrawHook:
    """Callback slot through which a router moves a request that has not started."""

    __slots__ = ("known_workers", "try_move")

    def __init__(self) -> None:
        self.known_workers: frozenset[InstanceId] | None = None
        """If set, the request moves only to workers that are not among these, as long as its own is not late."""
        self.try_move: Callable[[Decision], bool] | None = None
        """Set by the component that carries the request. Receives a decision for another worker, already reserved;
        returns whether it tries to move. If it does not, or is too late, it releases that decision like any other. None
        while the request cannot be moved. Must not raise."""


class Decision(msgspec.Struct, frozen=True):
    """Target of a request and the router's predictions for it."""

    instance: Instance
    overlap_blocks: int = 0
    predicted_ms: float | None = None
    kv_sources: tuple[KvSource, ...] = ()
    reservation_id: int = 0
    """Key of the reservation in the router that made the decision."""
    dp_rank: int | None = None
    """Data-parallel rank of the instance; None if the instance may choose."""
    withdraw_hook: WithdrawHook | None = None
    """Set by routers that may withdraw the request before it starts."""
    attempt: Attempt | None = None
    """State kept by the router's circuit breaker."""


_DEFAULT_SETTINGS = RouterSettings()


@dataclass(frozen=True, slots=True)
class RouterContext:
    """Dependencies of a router: the workers to choose from, and its process."""

    client: EndpointClient
    runtime: Runtime
    block_size: int
    """Block size of the requests' hashes."""
    settings: RouterSettings = _DEFAULT_SETTINGS
    role: Role = Role.AGGREGATED
    """Role of these workers: a request may pin one instance per role."""


class Router(Protocol):
    """The port. `route` is asynchronous: a router may queue the request or run in another process."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Choose an instance that is not excluded (it failed this request before) and has the request's adapter.

        Raises Unavailable if no instance can take the request, Overloaded if the queue is full. The decision holds a
        reservation until it is passed to `release`; a call that raises or is cancelled reserves nothing.
        """
        ...

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        """Record the first token, and the cached prompt tokens that the worker reported, if any.

        At most once per decision, before `release`. Must not raise.
        """
        ...

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """End the reservation of a decision: answered, failed, cancelled or never sent. Exactly once per decision.

        `usage` is set for complete answers; `outcome` feeds the circuit breaker. Must not raise.
        """
        ...

    async def close(self) -> None:
        """Stop the router. It receives no calls after this."""
        ...
