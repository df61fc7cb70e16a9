"""The admin port of a process that other machines reach: probes for all, controls for operators of the cluster."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tests.unit.runtime.security.test_secure_network import credentials
from tests.unit.runtime.test_admin import RecordedControls

from kvolt.runtime.admin import AdminServer
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.health import Health
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import AdminNetwork

NOW = SystemClock().wall()
AUTHORITY = ClusterAuthority.create(NOW)
PROBES = ("/live", "/ready", "/health", "/metrics")


def context(folder: Path, authority: ClusterAuthority | None, role: ProcessRole) -> ssl.SSLContext:
    """Context of a client that has a certificate of this authority, if any."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(cadata=AUTHORITY.issue(Identity(role, "a"), NOW).trusted_pem.decode())
    if authority is not None:
        issued = authority.issue(Identity(role, "a"), NOW)
        (folder / "client.pem").write_bytes(issued.chain_pem + issued.key_pem)
        made.load_cert_chain(folder / "client.pem")
    return made


@asynccontextmanager
async def admin(
    folder: Path, authority: ClusterAuthority | None, role: ProcessRole = ProcessRole.CLIENT
) -> AsyncIterator[tuple[httpx.AsyncClient, RecordedControls]]:
    controls = RecordedControls()
    server = AdminServer(
        AdminNetwork(credentials(folder, AUTHORITY, Identity(ProcessRole.WORKER, "w"))),
        SystemClock(),
        Health(),
        Metrics(CollectorRegistry()),
        controls,
        requires_identity=True,
    )
    address = await server.start("127.0.0.1:0")
    verify = context(folder, authority, role)
    async with httpx.AsyncClient(base_url=f"https://{address}", verify=verify, timeout=30) as client:
        yield client, controls
    await server.close()


async def test_probes_need_no_certificate(tmp_path: Path) -> None:
    async with admin(tmp_path, None) as (client, controls):
        for path in PROBES:
            assert (await client.get(path)).status_code in (200, 503)  # the process is not ready
        for path in ("/cordon", "/drain", "/resume", "/clear_kv_blocks", "/v1/load_lora_adapter", "/sleep"):
            refused = await client.post(path)
            assert refused.status_code == 403
            assert "kvolt cluster issue" in refused.text
        assert (await client.get("/status")).status_code == 403
        assert controls.calls == []


async def test_operators_of_the_cluster_may_control(tmp_path: Path) -> None:
    async with admin(tmp_path, AUTHORITY) as (client, controls):
        assert (await client.get("/status")).status_code == 200
        assert (await client.post("/cordon")).status_code == 200
        assert controls.calls == ["cordon"]


@pytest.mark.parametrize("role", [ProcessRole.WORKER, ProcessRole.POOL])
async def test_workers_may_not(tmp_path: Path, role: ProcessRole) -> None:
    async with admin(tmp_path, AUTHORITY, role) as (client, controls):
        assert (await client.post("/cordon")).status_code == 403
        assert controls.calls == []


async def test_certificates_of_others_do_not_connect(tmp_path: Path) -> None:
    async with admin(tmp_path, ClusterAuthority.create(NOW)) as (client, controls):
        with pytest.raises(httpx.TransportError):
            await client.get("/live")
        assert controls.calls == []
