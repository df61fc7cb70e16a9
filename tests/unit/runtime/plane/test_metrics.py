"""The request plane's numbers as Prometheus reads them."""

from __future__ import annotations

import asyncio
import random

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError, NotFound, WorkerLost
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.metrics import PlaneCollector
from kvolt.runtime.plane.port import Destination, IncomingStream, RequestPlane
from kvolt.runtime.plane.stats import outcome
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork


def scrape(plane: RequestPlane) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(PlaneCollector(plane))
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


class _Sink:
    def on_item(self, item: object) -> None: ...

    def on_end(self, error: KvoltError | None) -> None: ...


def test_a_fresh_process_exports_zeros() -> None:
    async def main() -> None:
        host = VirtualNetwork(random.Random(1)).host("a")
        plane = TcpPlane(host, ConnectionOptions(), "a", lambda stream: None)
        samples = scrape(plane)
        assert samples["kvolt_plane_connections", "in"] == samples["kvolt_plane_connections", "out"] == 0
        assert samples["kvolt_plane_bytes_total", "in"] == samples["kvolt_plane_refused_versions_total",] == 0
        assert samples.pop(("kvolt_plane_unfinished_message_limit_bytes",)) > 0
        assert all(value == 0 for value in samples.values())
        await plane.close()

    run_virtual(main)


def test_what_happens_is_counted() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        streams: list[IncomingStream] = []

        def serve(stream: IncomingStream) -> None:
            streams.append(stream)

        server = TcpPlane(network.host("server"), ConnectionOptions(), "server", serve)
        client = TcpPlane(network.host("client"), ConnectionOptions(), "client", serve)
        await server.listen("server:7000")
        to = Destination("server:7000", "ns.c.e")
        calls = [await client.open(to, b"\xc0", _Sink(), lambda data: data, connect_s=5.0) for _ in range(4)]
        await asyncio.sleep(0.1)
        for stream in streams:
            stream.send(Delta((1,)))
        streams[0].end()
        streams[1].end(NotFound("x"))
        calls[2].cancel()
        await asyncio.sleep(0.1)
        ours, theirs = scrape(client), scrape(server)
        assert ours["kvolt_plane_connections", "out"] == theirs["kvolt_plane_connections", "in"] == 1
        assert ours["kvolt_plane_connections", "in"] == theirs["kvolt_plane_connections", "out"] == 0
        assert (
            ours["kvolt_plane_streams_active", "client"]
            == theirs["kvolt_plane_streams_active", "server"]
            == 1
        )
        assert ours["kvolt_plane_connects_total", "ok"] == 1
        assert ours["kvolt_plane_items_total", "in"] == theirs["kvolt_plane_items_total", "out"] == 4
        assert ours["kvolt_plane_bytes_total", "in"] == theirs["kvolt_plane_bytes_total", "out"] > 0
        assert ours["kvolt_plane_frames_total", "out"] == theirs["kvolt_plane_frames_total", "in"] > 0
        for outcome_name in ("ok", "not_found", "cancelled"):
            assert ours["kvolt_plane_streams_total", outcome_name, "client"] == 1
            assert theirs["kvolt_plane_streams_total", outcome_name, "server"] == 1
        network.cut("client", "server", silent=False)
        await asyncio.sleep(0.1)
        ours = scrape(client)
        assert ours["kvolt_plane_connections", "out"] == ours["kvolt_plane_streams_active", "client"] == 0
        assert ours["kvolt_plane_connection_losses_total", "closed"] == 1
        assert ours["kvolt_plane_streams_total", "worker_lost", "client"] == 1
        for plane in (client, server):
            await plane.close()
        network.close()

    run_virtual(main)


def test_outcomes() -> None:
    assert outcome(None) == "ok"
    assert outcome(WorkerLost("x")) == "worker_lost"
