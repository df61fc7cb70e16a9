"""Where a process listens, and which discovery directory it trusts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from kvolt.cli.process import running
from kvolt.core.endpoints import EndpointAddress, InstanceState
from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.supervisor.plan import READY_FILE_VARIABLE, SUPERVISOR_PID_VARIABLE
from kvolt.runtime.system_ports import check_directory, make_ports, plane_host
from kvolt.runtime.tasks import TaskGroup


def settings(*given: str) -> Settings:
    overrides = [Override(key, text, key) for key, _, text in (item.partition("=") for item in given)]
    return load(environ=os.environ, cwd=Path("/"), overrides=overrides).settings


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ([], "127.0.0.1"),
        (["discovery.join_listen=127.0.0.1:7400"], "127.0.0.1"),
        (["discovery.join_listen=10.0.0.5:7400"], "10.0.0.5"),
        (["discovery.join_listen=[fd00::5]:7400"], "fd00::5"),
        (["discovery.join_listen=0.0.0.0:7400", "runtime.advertise=a"], "0.0.0.0"),
        (["discovery.join_listen=0.0.0.0:7400", "runtime.host=10.0.0.5"], "10.0.0.5"),
        (["discovery.join=127.0.0.1:7400"], "127.0.0.1"),
    ],
)
def test_others_must_reach_what_we_tell_them(given: list[str], host: str) -> None:
    assert plane_host(settings(*given)) == host


@pytest.mark.parametrize("listen", ["0.0.0.0:7400", "[::]:7400"])
def test_everywhere_is_no_address_to_tell(listen: str) -> None:
    with pytest.raises(ConfigError, match="the address of this machine is not set") as caught:
        plane_host(settings(f"discovery.join_listen={listen}"))
    assert "runtime.advertise" in caught.value.fields["remedy"]


@pytest.mark.parametrize("role", [ProcessRole.WORKER, ProcessRole.POOL], ids=str)
def test_a_process_that_others_would_refuse_is_no_join_server(tmp_path: Path, role: ProcessRole) -> None:
    (tmp_path / "cluster.key").touch(mode=0o600)
    (tmp_path / "cluster.key").write_bytes(ClusterAuthority.create(SystemClock().wall()).to_pem())
    given = settings(f"cluster.key={tmp_path / 'cluster.key'}", "discovery.join_listen=127.0.0.1:0")
    blocking = ThreadBlocking()
    with pytest.raises(ConfigError, match=f"a {role} cannot be the join server") as caught:
        make_ports(given, Metrics(CollectorRegistry()), blocking, Identity(role, "a"))
    assert "frontend or router" in caught.value.fields["remedy"]
    make_ports(given, Metrics(CollectorRegistry()), blocking, Identity(ProcessRole.ROUTER, "a"))
    blocking.close()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default state directory, not made yet."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"kvolt-{os.getuid()}"


async def test_the_default_directory_is_made_for_its_owner_alone(state: Path) -> None:
    previous = os.umask(0)
    try:
        await check_directory(settings())
    finally:
        os.umask(previous)
    assert state.stat().st_mode & 0o777 == 0o700
    await check_directory(settings())


async def test_a_default_directory_that_others_can_write_is_refused(state: Path) -> None:
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ConfigError, match="is writable by other users") as caught:
        await check_directory(settings())
    assert "chmod 700" in caught.value.fields["remedy"]
    await check_directory(settings(f"discovery.path={state / 'mine'}"))
    state.chmod(0o755)
    await check_directory(settings())


async def test_a_default_directory_of_another_user_is_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        await check_directory(settings())


async def test_a_link_in_place_of_the_default_directory_is_refused(state: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        await check_directory(settings())


async def test_leases_are_renewed_while_requests_occupy_all_shared_threads(tmp_path: Path) -> None:
    blocking, gate, task_group = ThreadBlocking(1), threading.Event(), TaskGroup("test")
    given = settings(f"discovery.path={tmp_path}")
    discovery = make_ports(
        given, Metrics(CollectorRegistry()), blocking, Identity(ProcessRole.WORKER, "a")
    ).discovery(cast(Any, None))
    try:
        occupied = task_group.start(blocking.run(lambda: gate.wait(20.0), 30.0), "occupy")
        lease = await discovery.lease(5.0)
        await discovery.put("instances/a", b"1", lease)
        assert await discovery.get_prefix("instances/") == {"instances/a": b"1"}
        assert not occupied.done()
    finally:
        gate.set()
        await discovery.close()
        await task_group.close()
        blocking.close()


async def test_a_process_marks_that_it_serves_for_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ready"
    monkeypatch.setenv(READY_FILE_VARIABLE, str(marker))
    monkeypatch.setenv(SUPERVISOR_PID_VARIABLE, "77")
    given = settings(f"discovery.path={tmp_path / 'discovery'}", "admin.enabled=false")
    async with running(given, "a", ProcessRole.FRONTEND) as process:
        assert READY_FILE_VARIABLE not in os.environ  # helper processes must not create it
        assert not marker.exists()
        await process.runtime.serve_streams(EndpointAddress("ns", "c", "e"), lambda stream: stream.end())
        assert marker.exists()
        status = await process.runtime.status()
        assert (status.pid, status.supervisor_pid) == (os.getpid(), 77)
        assert status.endpoints[0].state is InstanceState.READY
        marker.unlink()  # the supervisor stops
        assert (await process.runtime.status()).endpoints[0].state is InstanceState.DRAINING


async def test_a_process_is_draining_while_its_stoppers_run(tmp_path: Path) -> None:
    async def stop(drain_s: float) -> None:
        states.extend(endpoint.state for endpoint in (await process.runtime.status()).endpoints)

    states: list[InstanceState] = []
    async with running(
        settings(f"discovery.path={tmp_path / 'discovery'}", "admin.enabled=false"), "a", ProcessRole.WORKER
    ) as process:
        await process.runtime.serve_streams(EndpointAddress("ns", "c", "e"), lambda stream: stream.end())
        process.before_close(stop)
    assert states == [InstanceState.DRAINING]
