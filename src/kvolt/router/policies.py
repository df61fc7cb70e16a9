"""Routers by name, for settings and flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvolt.router.exact import ExactRouter
from kvolt.router.least_loaded import LeastLoadedRouter, PowerOfTwoRouter, RandomRouter
from kvolt.router.policy import classic, latency
from kvolt.router.port import RoundRobinRouter, Router, RouterContext

NewRouter = Callable[[RouterContext], Router]

ROUTERS: dict[str, NewRouter] = {
    "round-robin": lambda context: RoundRobinRouter(context.client),
    "least-loaded": lambda context: LeastLoadedRouter(context.client),
    "power-of-two": lambda context: PowerOfTwoRouter(context.client, context.runtime.ports.rng),
    "random": lambda context: RandomRouter(context.client, context.runtime.ports.rng),
    "latency": partial(ExactRouter, policy=latency()),
    "classic": partial(ExactRouter, policy=classic()),
}
"""The first is the default."""
