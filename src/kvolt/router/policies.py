"""Routers by name, for settings and flags."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.router.least_loaded import LeastLoadedRouter
from kvolt.router.port import RoundRobinRouter, Router
from kvolt.runtime.client import EndpointClient

NewRouter = Callable[[EndpointClient], Router]

ROUTERS: dict[str, NewRouter] = {"round-robin": RoundRobinRouter, "least-loaded": LeastLoadedRouter}
"""The first is the default."""
