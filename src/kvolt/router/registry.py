"""Routers by name, for settings and flags."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.errors import ConfigError
from kvolt.router.breaker import Breakers
from kvolt.router.direct import DirectRouter
from kvolt.router.event_fed_router import ExactRouter
from kvolt.router.least_loaded import LeastLoadedRouter, PowerOfTwoRouter, RandomRouter
from kvolt.router.policy.custom import CustomPolicy, is_custom
from kvolt.router.policy.policy import Policy
from kvolt.router.policy.registry import classic_of, latency_of, policy_named, shadow_of
from kvolt.router.port import RoundRobinRouter, Router, RouterContext
from kvolt.router.queue.queue_router import QueueOptions, QueueRouter
from kvolt.runtime.config.router_settings import RouterSettings


def _breakers(context: RouterContext) -> Breakers:
    return Breakers(context.runtime.ports.clock.monotonic)


NewRouter = Callable[[RouterContext], Router]

ROUTERS: dict[str, NewRouter] = {
    "latency": lambda context: _late(context, "latency", latency_of(context.settings)),
    "classic": lambda context: _late(context, "classic", classic_of(context.settings)),
    "round-robin": lambda context: RoundRobinRouter(context.client, context.role, _breakers(context)),
    "least-loaded": lambda context: LeastLoadedRouter(context.client, context.role, _breakers(context)),
    "power-of-two": lambda context: PowerOfTwoRouter(
        context.client, context.runtime.ports.rng, context.role, _breakers(context)
    ),
    "random": lambda context: RandomRouter(
        context.client, context.runtime.ports.rng, context.role, _breakers(context)
    ),
    "direct": lambda context: DirectRouter(context.client, context.role, _breakers(context)),
}
"""The first is the default."""

_BLIND = frozenset(("round-robin", "least-loaded", "power-of-two", "random", "direct"))


def reads_kv_events(name: str) -> bool:
    """Whether a router looks at what workers hold; others need not be told."""
    return name not in _BLIND


def find_router(name: str, settings: RouterSettings | None = None) -> NewRouter:
    """One of ROUTERS, or one with somebody's own policy. ConfigError before anything runs: for a name that there is
    not, and for a policy, or a shadow of the settings, that does not work."""
    if settings is not None:
        shadow_of(settings)
    if not is_custom(name):
        if name not in ROUTERS:
            known = f"known: {', '.join(ROUTERS)}, FILE.py:FUNCTION, MODULE:FUNCTION"
            raise ConfigError(f"there is no router {name!r}", key="router", remedy=known)
        return ROUTERS[name]
    CustomPolicy(name, latency_of(RouterSettings()))
    return lambda context: _late(context, name, policy_named(name, context.settings))


def _late(context: RouterContext, name: str, policy: Policy) -> Router:
    """One that knows what workers hold; requests wait in it while all of them have enough to do."""
    inner = ExactRouter(context, policy)
    inner.selector.stats.policy = name
    settings = context.settings
    if not settings.queue:
        return inner
    return QueueRouter(inner, context.runtime.ports.clock.monotonic, QueueOptions.of(settings))
