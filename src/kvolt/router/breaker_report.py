"""Breakers of a process's routers, for Prometheus and for `kvolt status`; read off when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvolt.router.breaker import Breakers, BreakerState
from kvolt.router.filters import Eligible
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import who_decides

BREAKER_DETAILS = "breakers"
"""In a process's status: see `describe_breakers`."""

_SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


@runtime_checkable
class _Choosing(Protocol):
    """A router that chooses among instances itself."""

    eligible: Eligible


def _breakers(router: Router) -> Breakers | None:
    deciding = who_decides(router)
    return deciding.eligible.breakers if isinstance(deciding, _Choosing) else None


def breaker_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Of the routers that decide here, each with the endpoint that it decides for. A worker has series while it has
    failed requests lately."""
    state = GaugeMetricFamily(
        "kvolt_router_breaker_state",
        "Circuit breaker of a worker that has failed requests lately: 0 closed, 1 half-open, 2 open",
        labels=("endpoint", "worker_id"),
    )
    rate = GaugeMetricFamily(
        "kvolt_router_worker_failure_rate",
        "Share of a worker's recent requests that failed",
        labels=("endpoint", "worker_id"),
    )
    opened = CounterMetricFamily(
        "kvolt_router_breaker_opened", "Times that the breaker of a worker opened", labels=("endpoint",)
    )
    for endpoint, router in routers:
        breakers = _breakers(router)
        if breakers is None:
            continue
        opened.add_metric((endpoint,), breakers.num_opened)
        for instance_id, view in sorted(breakers.views().items()):
            rate.add_metric((endpoint, instance_id), view.failure_rate)
            state.add_metric((endpoint, instance_id), _SEVERITY[view.state])
    yield from (state, rate, opened)


def describe_breakers(routers: Iterable[Router]) -> list[dict[str, Any]]:
    """Every breaker that is not closed."""
    return [
        {
            "worker": instance_id,
            "state": view.state.value,
            "failure_rate": round(view.failure_rate, 3),
            "retry_in_s": round(view.retry_in_s, 3),
        }
        for router in routers
        if (breakers := _breakers(router)) is not None
        for instance_id, view in sorted(breakers.views().items())
        if view.state is not BreakerState.CLOSED
    ]
