"""Prometheus metrics of the request plane, read from the live objects at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.runtime.plane.port import RequestPlane

_HELP = {
    "connections": "Open request plane connections",
    "streams_active": "Streams open now",
    "send_buffer_bytes": "Bytes in connection send buffers",
    "queue_depth": "Queued work: streams with a backlog, chunked messages, opens waiting to start",
    "unfinished_message_bytes": "Bytes buffered for incomplete messages of peers",
    "unfinished_message_limit_bytes": "Byte limit for incomplete messages of all peers; one address may use half"
    " of it",
    "unfinished_messages_shed": "Times that a peer's incomplete messages were dropped because the byte limit was"
    " exceeded",
    "refused_connections": "Connections refused because of the limit per process or per peer address",
    "refused_streams": "Streams refused because of the limit per process or per peer address",
    "connects": "Connection attempts",
    "connection_losses": "Connections lost",
    "bytes": "Bytes transferred",
    "frames": "Frames transferred",
    "items": "Stream items transferred",
    "items_merged": "Stream items merged for a slow reader",
    "refused_versions": "Connections without a common version",
    "heartbeat_timeouts": "Connections closed because the peer missed its heartbeats",
    "stalls": "Stalls of this process",
    "stalled_seconds": "Seconds in which this process was stalled",
}

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class PlaneCollector(Collector):
    """Exports a plane's PlaneStats and PlaneGauges."""

    def __init__(self, plane: RequestPlane) -> None:
        self._plane = plane

    def collect(self) -> Iterator[Metric]:
        stats, now = self._plane.stats, self._plane.gauges()
        connections = {"in": now.num_accepted, "out": now.num_dialed}
        streams = {"client": now.num_calls, "server": now.num_served}
        queues = {
            "streams_held_back": now.num_backlogged,
            "bulk_messages": now.num_bulk,
            "opens": now.num_opens_waiting,
        }
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield _family(gauge, "connections", connections, "direction")
        yield _family(gauge, "streams_active", streams, "side")
        yield _family(gauge, "send_buffer_bytes", now.send_buffer_bytes)
        yield _family(gauge, "queue_depth", queues, "queue")
        yield _family(gauge, "unfinished_message_bytes", now.unfinished_bytes)
        yield _family(gauge, "unfinished_message_limit_bytes", now.unfinished_limit_bytes)
        yield _family(counter, "unfinished_messages_shed", now.num_shed)
        yield _family(counter, "refused_connections", stats.refused_connections)
        yield _family(counter, "refused_streams", now.num_refused_streams)
        yield _family(counter, "connects", stats.connects, "outcome")
        yield _family(counter, "connection_losses", stats.losses, "reason")
        yield _family(counter, "bytes", {"in": stats.bytes_in, "out": stats.bytes_out}, "direction")
        yield _family(counter, "frames", {"in": stats.frames_in, "out": stats.frames_out}, "direction")
        yield _family(counter, "items", {"in": stats.items_in, "out": stats.items_out}, "direction")
        yield _family(counter, "items_merged", stats.merged)
        yield _family(counter, "refused_versions", stats.refused_versions)
        yield _family(counter, "heartbeat_timeouts", stats.heartbeat_timeouts)
        yield _family(counter, "stalls", stats.stalls)
        yield _family(counter, "stalled_seconds", stats.stalled_s)
        ended = CounterMetricFamily("kvolt_plane_streams", "Streams ended", labels=("side", "outcome"))
        for side, outcomes in (("client", stats.calls_ended), ("server", stats.served_ended)):
            for outcome, count in sorted(outcomes.items()):
                ended.add_metric((side, outcome), count)
        yield ended


def _family(kind: Family, name: str, values: float | Mapping[str, float], label: str = "") -> Metric:
    """A family with one number, or with one per value of its label."""
    if not isinstance(values, Mapping):
        return kind(f"kvolt_plane_{name}", _HELP[name], values)
    family = kind(f"kvolt_plane_{name}", _HELP[name], labels=(label,))
    for value, number in sorted(values.items()):
        family.add_metric((value,), number)
    return family
