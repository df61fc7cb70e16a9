"""The HTTP service of `kvolt router`: put together from the settings, and with the engines' own event formats."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.cli.process import Process
from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.kv_formats.translator import Translator
from kvolt.router.policy.registry import policy_named
from kvolt.router.service.http_service import RouterHttp, Translate
from kvolt.router.service.standalone import Standalone

_NAME_BYTES = 64 * 1024 * 1024
"""For the names that one rank of an engine has for its blocks."""


def router_http(process: Process, policy: str) -> RouterHttp:
    """`policy` is one of those that decide by what workers hold."""
    settings, ports = process.settings, process.runtime.ports
    policy_named(policy, settings.router)  # a ConfigError is told before anything runs

    def new_standalone(block_size: int) -> Standalone:
        chosen = policy_named(policy, settings.router)
        return Standalone(block_size, chosen, ports.clock.monotonic, ports.rng, settings.router)

    service = RouterHttp(
        ports.network,
        ports.clock,
        new_standalone,
        {engine.value: partial(_translate, engine) for engine in Engine},
        process.metrics.render,
        process.metrics.http_observer("router"),
    )
    process.metrics.registry.register(RouterHttpCollector(service))
    process.before_close(service.close)
    return service


def _translate(engine: Engine, block_size: int) -> Translate:
    return Translator(engine, block_size, max_bytes=_NAME_BYTES).translate


class RouterHttpCollector(Collector):
    """What is registered and reserved over HTTP, by model."""

    def __init__(self, service: RouterHttp) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "kvolt_router_http_workers", "Workers registered over HTTP", labels=("model",)
        )
        reservations = GaugeMetricFamily(
            "kvolt_router_http_reservations", "Reservations that are not over", labels=("model",)
        )
        expired = CounterMetricFamily(
            "kvolt_router_http_expired", "Reservations that were not renewed in time", labels=("model",)
        )
        index_bytes = GaugeMetricFamily(
            "kvolt_router_http_index_bytes", "Memory of the index of posted blocks", labels=("model",)
        )
        for name, model in sorted(self._service.models.items()):
            workers.add_metric((name,), len(model.workers))
            reservations.add_metric((name,), model.num_reservations)
            expired.add_metric((name,), model.num_expired)
            index_bytes.add_metric((name,), model.posted.index.num_bytes)
        yield from (workers, reservations, expired, index_bytes)
