"""The request plane's numbers for Prometheus, read off the live objects at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.runtime.connections import Connections


class PlaneCollector(Collector):
    """Exports a process's Connections and their PlaneStats."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        stats = self._connections.stats
        open_now = self._connections.all()
        dialed = sum(connection.dialer for connection in open_now)
        yield _gauge(
            "connections",
            "Open request plane connections",
            "direction",
            {"in": len(open_now) - dialed, "out": dialed},
        )
        yield _gauge(
            "streams_active",
            "Streams open now",
            "side",
            {
                "client": sum(connection.session.num_calls for connection in open_now),
                "server": sum(connection.session.num_served for connection in open_now),
            },
        )
        yield _gauge(
            "send_buffer_bytes",
            "Bytes that wait in connections for their peer to read",
            None,
            {"": sum(connection.send_buffer_bytes for connection in open_now)},
        )
        yield _gauge(
            "queue_depth",
            "What waits to be sent: streams that keep items back, long messages in pieces",
            "queue",
            {
                "streams_held_back": sum(connection.session.num_held for connection in open_now),
                "bulk_messages": sum(connection.session.num_bulk for connection in open_now),
            },
        )
        yield _counter("connects", "Attempts to connect", "outcome", stats.connects)
        yield _counter("connection_losses", "Connections that were lost", "reason", stats.losses)
        yield _counter("bytes", "Bytes moved", "direction", {"in": stats.bytes_in, "out": stats.bytes_out})
        yield _counter(
            "frames", "Frames moved", "direction", {"in": stats.frames_in, "out": stats.frames_out}
        )
        yield _counter(
            "items", "Stream items moved", "direction", {"in": stats.items_in, "out": stats.items_out}
        )
        yield _counter("items_merged", "Deltas merged for a slow reader", None, {"": stats.merged})
        yield _counter(
            "refused_versions", "Peers without a common version", None, {"": stats.refused_versions}
        )
        yield _counter("heartbeat_timeouts", "Peers that fell silent", None, {"": stats.heartbeat_timeouts})
        ended = CounterMetricFamily("kvolt_streams", "Streams that ended", labels=("side", "outcome"))
        for side, outcomes in (("client", stats.calls_ended), ("server", stats.served_ended)):
            for outcome, count in sorted(outcomes.items()):
                ended.add_metric((side, outcome), count)
        yield ended


def _gauge(name: str, text: str, label: str | None, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvolt_{name}", text, labels=(label,) if label else ())
    for value, number in sorted(values.items()):
        family.add_metric((value,) if label else (), number)
    return family


def _counter(name: str, text: str, label: str | None, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvolt_{name}", text, labels=(label,) if label else ())
    for value, number in sorted(values.items()):
        family.add_metric((value,) if label else (), number)
    return family
