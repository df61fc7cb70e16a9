"""Client: what it sees of a cluster, and what it can do to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvolt import Client
from kvolt.cli.process import running
from kvolt.core.endpoints import EndpointAddress, InstanceState
from kvolt.core.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.runtime.config.loader import load
from kvolt.runtime.security.identity import ProcessRole
from kvolt.worker.worker import Worker


@asynccontextmanager
async def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A worker and a frontend's registration, found through the environment as the command finds them."""
    environ = {"KVOLT_DISCOVERY_PATH": str(folder / "discovery"), "KVOLT_DISCOVERY_POLL_S": "0.05"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    settings = load(environ=environ, cwd=folder).settings
    async with (
        running(settings, "worker-0", ProcessRole.WORKER) as process,
        running(settings, "frontend", ProcessRole.FRONTEND) as front,
    ):
        engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), SimArguments())
        worker = Worker(process.runtime, engine, settings.namespace)
        await worker.start()
        frontend = EndpointAddress(settings.namespace, "frontend", "http")
        await front.runtime.serve_streams(frontend, lambda stream: stream.end(), {"http": "127.0.0.1:8000"})
        await process.runtime.serve_streams(frontend, lambda stream: stream.end(), {"http": "nonsense"})
        try:
            yield
        finally:
            await worker.close()


async def test_a_client_sees_and_drains_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        with Client() as client:
            (worker,) = client.workers()
            assert (worker.process, worker.info.model, worker.info.engine) == ("worker-0", "sim-tiny", "sim")
            assert client.models() == ["sim-tiny"]
            assert client.urls() == ["http://127.0.0.1:8000"]
            assert [view.name for view in client.status()] == ["frontend", "worker-0"]
            assert all(view.status is not None for view in client.status())
            assert client.status()[0].http == "127.0.0.1:8000"

            drained = client.drain("worker-0", timeout_s=5.0)
            assert {endpoint.state for endpoint in drained.endpoints} == {InstanceState.DRAINING}
            assert client.models() == []
            client.resume(worker.address)
            assert client.models() == ["sim-tiny"]
            client.cordon("worker-0")
            assert client.workers()[0].state is InstanceState.CORDONED

            with pytest.raises(
                NotFound, match="no process 'worker-9' is registered; known: frontend, worker-0"
            ):
                client.drain("worker-9")
            for wrong in (-1.0, math.nan, math.inf, 1e300):
                with pytest.raises(InvalidRequest, match="the timeout must be 0 to 86400 s"):
                    client.drain("worker-0", timeout_s=wrong)
        with pytest.raises(Unavailable, match="the client is closed"):
            client.models()

    async with cluster(tmp_path, monkeypatch):
        await asyncio.to_thread(look)


def test_an_empty_cluster_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOLT_DISCOVERY_PATH", str(tmp_path / "discovery"))
    with Client(namespace="other") as client:
        assert (client.models(), client.workers(), client.status(), client.urls()) == ([], [], [], [])


def test_bad_settings_are_errors_of_the_config() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Client(join="nonsense")
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        Client(config="missing.toml")
