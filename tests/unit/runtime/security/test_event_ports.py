"""Which event plane a process has, and in whose name it publishes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from prometheus_client import CollectorRegistry

from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config.settings import ClusterSettings, EventsSettings, Settings
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.events.mem import MemEvents
from kvolt.runtime.events.plane_events import PlaneEvents
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.system_ports import make_ports

WORKER = Identity(ProcessRole.WORKER, "worker-0")


@pytest.fixture
def blocking() -> Iterator[ThreadBlocking]:
    blocking = ThreadBlocking(1)
    yield blocking
    blocking.close()


def events_of(cluster: ClusterSettings, kind: Literal["mem", "zmq"], blocking: ThreadBlocking) -> EventPlane:
    settings = Settings(cluster=cluster, events=EventsSettings(kind=kind))
    ports = make_ports(settings, Metrics(CollectorRegistry()), blocking, WORKER)
    assert ports.identity == (None if cluster.key is None else WORKER)
    server = EndpointServer()
    plane = ports.plane("p", server.on_open)
    return ports.events(MemDiscovery(MemStore(), ports.clock, ports.rng), plane, server)


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterSettings:
    path = tmp_path / "kvolt.key"
    path.touch(0o600)
    path.write_bytes(ClusterAuthority.create(SystemClock().wall()).to_pem())
    return ClusterSettings(key=str(path))


async def test_a_key_chooses_the_request_plane(cluster: ClusterSettings, blocking: ThreadBlocking) -> None:
    assert isinstance(events_of(cluster, "zmq", blocking), PlaneEvents)
    assert isinstance(events_of(ClusterSettings(), "zmq", blocking), ZmqEvents)


async def test_events_within_a_process_have_its_identity(
    cluster: ClusterSettings, blocking: ThreadBlocking
) -> None:
    """Else its own load reports would count as forged."""
    events = events_of(cluster, "mem", blocking)
    assert isinstance(events, MemEvents)
    await events.start()
    stream = events.subscribe("load")
    events.publish("load", b"busy")
    assert (await anext(stream)).identity == WORKER.uri
    await events.close()
