"""Routers by name, for settings and flags."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.errors import ConfigError
from kvolt.router import balancing
from kvolt.router.breaker import Breakers
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.policy.custom import CustomPolicy, is_custom
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.registry import classic_policy, find_policy, latency_policy, shadow_policy
from kvolt.router.port import Router, RouterContext
from kvolt.router.queue.queue_router import QueueOptions, QueueRouter
from kvolt.runtime.config.router_settings import RouterSettings


def _breakers(context: RouterContext) -> Breakers:
    return Breakers(context.runtime.ports.clock.monotonic)


NewRouter = Callable[[RouterContext], Router]

ROUTERS: dict[str, NewRouter] = {
    "latency": lambda context: _kv_aware(context, "latency", latency_policy(context.settings)),
    "classic": lambda context: _kv_aware(context, "classic", classic_policy(context.settings)),
    "round-robin": lambda context: balancing.RoundRobinRouter(
        context.client, context.role, _breakers(context)
    ),
    "least-loaded": lambda context: balancing.LeastLoadedRouter(
        context.client, context.role, _breakers(context)
    ),
    "power-of-two": lambda context: balancing.PowerOfTwoRouter(
        context.client, context.runtime.ports.rng, context.role, _breakers(context)
    ),
    "random": lambda context: balancing.RandomRouter(
        context.client, context.runtime.ports.rng, context.role, _breakers(context)
    ),
    "direct": lambda context: balancing.DirectRouter(context.client, context.role, _breakers(context)),
}
"""The first is the default."""

_BLIND = frozenset(("round-robin", "least-loaded", "power-of-two", "random", "direct"))


def reads_kv_events(name: str) -> bool:
    """Whether a router uses KV events; if not, workers need not publish them."""
    return name not in _BLIND


def find_router(name: str, settings: RouterSettings | None = None) -> NewRouter:
    """Factory of a named router or of a user-defined policy.

    Raises ConfigError before anything starts: unknown name, or a policy or shadow policy that does not load.
    """
    if settings is not None:
        shadow_policy(settings)
    if not is_custom(name):
        if name not in ROUTERS:
            known = f"known: {', '.join(ROUTERS)}, FILE.py:FUNCTION, MODULE:FUNCTION"
            raise ConfigError(f"unknown router: {name!r}", key="router", remedy=known)
        return ROUTERS[name]
    CustomPolicy(name, latency_policy(RouterSettings()))
    return lambda context: _kv_aware(context, name, find_policy(name, context.settings))


def _kv_aware(context: RouterContext, name: str, policy: Policy) -> Router:
    """KV-aware router, behind a queue for requests that arrive while all workers are saturated."""
    inner = EventFedRouter(context, policy)
    inner.selector.stats.policy = name
    settings = context.settings
    if not settings.queue:
        return inner
    return QueueRouter(inner, context.runtime.ports.clock.monotonic, QueueOptions.of(settings))
