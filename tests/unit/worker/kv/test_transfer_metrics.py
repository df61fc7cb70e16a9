"""Paths in Prometheus: speeds by peer, slow paths by what they lack."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.transfer import tls_lab

from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.paths.capabilities import MachineFacts, capabilities_of
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES
from kvolt.transfer.paths.path_watch import Endpoints, PathWatch, TransferPath
from kvolt.worker.kv.transfer_metrics import PathMetrics

PLAIN = capabilities_of(MachineFacts())


def told(watch: PathWatch | None) -> set[str]:
    registry = CollectorRegistry()
    registry.register(PathMetrics(lambda: watch))
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_no_path_metrics_without_transfers() -> None:
    assert told(None) == set()


def test_speeds_and_slow_paths_are_exported() -> None:
    watch = PathWatch("10.0.0.1", "me", PLAIN)
    peer = watch.peer("10.0.0.2", "you", is_near=False, capabilities=PLAIN)
    way = TransferPath(Endpoints(MemoryKind.SHARED, MemoryKind.SHARED), "tcp")
    watch.observe(peer, way, SMALL_BYTES, 0.25)
    watch.observe(peer, way, LARGE_BYTES, 0.5)  # half of it is the latency
    watch.check_fallback(peer, way)
    assert told(watch) == {
        'kvolt_transfer_slow_path_total{missing="nixl",path="tcp"} 1.0',
        'kvolt_transfer_slow_path_total{missing="rdma",path="tcp"} 1.0',
        'kvolt_transfer_link_bytes_per_second{path="tcp",peer="10.0.0.2"} 1.6777216e+07',
        'kvolt_transfer_link_latency_seconds{path="tcp",peer="10.0.0.2"} 0.25',
    }


def test_tls_handshakes_are_exported_with_a_cluster_key() -> None:
    watch = PathWatch("10.0.0.1", "me", PLAIN)
    agent = TransferAgent(credentials=tls_lab.of_worker())
    agent.handshakes["refused"] += 2
    registry = CollectorRegistry()
    registry.register(PathMetrics(lambda: watch, lambda: agent))
    agent.close()
    text = generate_latest(registry).decode()
    assert 'kvolt_transfer_tls_handshakes_total{outcome="refused"} 2.0' in text
