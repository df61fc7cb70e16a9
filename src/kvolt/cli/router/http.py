"""HTTP service of `kvolt router`, with the KV event formats of the engines."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.cli.process import Process
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.kv_formats.translator import Translator
from kvolt.router.policy.registry import find_policy
from kvolt.router.service.http_service import RouterHttp, Translate
from kvolt.router.service.standalone import Standalone
from kvolt.runtime.network import Network, is_loopback
from kvolt.runtime.security.secure_network import SecureNetwork

_NAME_BYTES = 64 * 1024 * 1024
"""Memory limit for the block names of one engine rank."""


def router_http(process: Process, host: str, policy: str) -> RouterHttp:
    """Create the HTTP service. `policy` must be a KV-aware policy.

    With a cluster key, clients on other machines need a certificate of the cluster.
    """
    settings, ports = process.settings, process.runtime.ports
    network: Network = ports.network
    if ports.credentials is not None and not is_loopback(host):
        network = SecureNetwork(ports.credentials, process.metrics.count_handshake)
    find_policy(policy, settings.router)  # raises ConfigError before anything runs

    def new_standalone(block_size: int) -> Standalone:
        kv_policy = find_policy(policy, settings.router)
        return Standalone(block_size, kv_policy, ports.clock.monotonic, ports.rng, settings.router)

    service = RouterHttp(
        network,
        ports.clock,
        new_standalone,
        {engine.value: partial(_translate, engine) for engine in SourceEngine},
        process.metrics.render,
        process.metrics.http_observer("router"),
    )
    process.metrics.registry.register(RouterHttpCollector(service))
    process.before_close(service.close)
    return service


def _translate(engine: SourceEngine, block_size: int) -> Translate:
    return Translator(engine, block_size, max_bytes=_NAME_BYTES).translate


class RouterHttpCollector(Collector):
    """Metrics of workers and reservations registered over HTTP, by model."""

    def __init__(self, service: RouterHttp) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        workers = GaugeMetricFamily(
            "kvolt_router_http_workers", "Workers registered over HTTP", labels=("model",)
        )
        reservations = GaugeMetricFamily(
            "kvolt_router_http_reservations", "Open reservations", labels=("model",)
        )
        expired = CounterMetricFamily(
            "kvolt_router_http_expired", "Reservations that expired without renewal", labels=("model",)
        )
        index_bytes = GaugeMetricFamily(
            "kvolt_router_http_index_bytes", "Memory of the prefix index", labels=("model",)
        )
        for name, model in sorted(self._service.models.items()):
            workers.add_metric((name,), len(model.workers))
            reservations.add_metric((name,), model.num_reservations)
            expired.add_metric((name,), model.num_expired)
            index_bytes.add_metric((name,), model.event_index.index.num_bytes)
        yield from (workers, reservations, expired, index_bytes)
