"""Circuit breakers of a process's routers, for Prometheus and `kvolt status`; read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvolt.router.breaker import Breakers, BreakerState
from kvolt.router.filters import CandidateFilter
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import deciding_router

BREAKER_DETAILS = "breakers"
"""Key in the process status, see `describe_breakers`."""

_SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


@runtime_checkable
class _Choosing(Protocol):
    """A router that filters candidates itself."""

    candidate_filter: CandidateFilter


def _breakers(router: Router) -> Breakers | None:
    deciding = deciding_router(router)
    return deciding.candidate_filter.breakers if isinstance(deciding, _Choosing) else None


def breaker_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Metric families of routers by endpoint. A worker has series while it has recent failures."""
    state = GaugeMetricFamily(
        "kvolt_router_breaker_state",
        "Circuit breaker of a worker: 0 closed, 1 half-open, 2 open",
        labels=("endpoint", "worker_id"),
    )
    rate = GaugeMetricFamily(
        "kvolt_router_worker_failure_rate",
        "Fraction of a worker's recent requests that failed",
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
    """All breakers that are not closed."""
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
