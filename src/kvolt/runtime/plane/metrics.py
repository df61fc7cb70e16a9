"""Prometheus metrics of the request plane, read from the live objects at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.runtime.plane.port import RequestPlane


class PlaneCollector(Collector):
    """Exports a plane's PlaneStats and PlaneGauges."""

    def __init__(self, plane: RequestPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        stats, now = self._plane.stats, self._plane.gauges()
        yield _gauge(
            "connections",
            "Open request plane connections",
            "direction",
            {"in": now.num_accepted, "out": now.num_dialed},
        )
        yield _gauge(
            "streams_active",
            "Streams open now",
            "side",
            {"client": now.num_calls, "server": now.num_served},
        )
        yield _gauge(
            "send_buffer_bytes",
            "Bytes in connection send buffers",
            None,
            {"": now.send_buffer_bytes},
        )
        yield _gauge(
            "queue_depth",
            "Queued work: streams with a backlog, chunked messages, opens waiting to start",
            "queue",
            {
                "streams_held_back": now.num_backlogged,
                "bulk_messages": now.num_bulk,
                "opens": now.num_opens_waiting,
            },
        )
        yield _gauge(
            "unfinished_message_bytes",
            "Bytes buffered for incomplete messages of peers",
            None,
            {"": now.unfinished_bytes},
        )
        yield _gauge(
            "unfinished_message_limit_bytes",
            "Byte limit for incomplete messages of all peers; one address may use half of it",
            None,
            {"": now.unfinished_limit_bytes},
        )
        yield _counter(
            "unfinished_messages_shed",
            "Times that a peer's incomplete messages were dropped because the byte limit was exceeded",
            None,
            {"": now.num_shed},
        )
        yield _counter(
            "refused_connections",
            "Connections refused because of the limit per process or per peer address",
            None,
            {"": stats.refused_connections},
        )
        yield _counter(
            "refused_streams",
            "Streams refused because of the limit per process or per peer address",
            None,
            {"": now.num_refused_streams},
        )
        yield _counter("connects", "Connection attempts", "outcome", stats.connects)
        yield _counter("connection_losses", "Connections lost", "reason", stats.losses)
        yield _counter(
            "bytes", "Bytes transferred", "direction", {"in": stats.bytes_in, "out": stats.bytes_out}
        )
        yield _counter(
            "frames", "Frames transferred", "direction", {"in": stats.frames_in, "out": stats.frames_out}
        )
        yield _counter(
            "items", "Stream items transferred", "direction", {"in": stats.items_in, "out": stats.items_out}
        )
        yield _counter("items_merged", "Stream items merged for a slow reader", None, {"": stats.merged})
        yield _counter(
            "refused_versions", "Connections without a common version", None, {"": stats.refused_versions}
        )
        yield _counter(
            "heartbeat_timeouts",
            "Connections closed because the peer missed its heartbeats",
            None,
            {"": stats.heartbeat_timeouts},
        )
        yield _counter("stalls", "Stalls of this process", None, {"": stats.stalls})
        yield _counter(
            "stalled_seconds",
            "Seconds in which this process was stalled",
            None,
            {"": stats.stalled_s},
        )
        ended = CounterMetricFamily("kvolt_plane_streams", "Streams ended", labels=("side", "outcome"))
        for side, outcomes in (("client", stats.calls_ended), ("server", stats.served_ended)):
            for outcome, count in sorted(outcomes.items()):
                ended.add_metric((side, outcome), count)
        yield ended


def _gauge(name: str, text: str, label: str | None, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvolt_plane_{name}", text, labels=(label,) if label else ())
    for value, number in sorted(values.items()):
        family.add_metric((value,) if label else (), number)
    return family


def _counter(name: str, text: str, label: str | None, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvolt_plane_{name}", text, labels=(label,) if label else ())
    for value, number in sorted(values.items()):
        family.add_metric((value,) if label else (), number)
    return family
