"""Health states and the admin server over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvolt.core.errors import InvalidRequest, KvoltError, NotFound, Unavailable, Unsupported
from kvolt.runtime.admin import COMMANDS, AdminServer
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.health import Health, HealthState
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import SocketNetwork


class RecordedControls:
    def __init__(self) -> None:
        self.calls: list[object] = []

    async def cordon(self) -> None:
        self.calls.append("cordon")

    async def drain(self, timeout_s: float) -> None:
        self.calls.append(("drain", timeout_s))

    async def resume(self) -> None:
        raise Unavailable("already stopping")

    async def command(self, name: str, body: bytes) -> dict[str, object]:
        self.calls.append((name, body))
        return {"cleared_blocks": 7}

    async def status(self) -> dict[str, object]:
        return {"calls": len(self.calls)}


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def controls() -> RecordedControls:
    return RecordedControls()


@pytest.fixture
async def client(health: Health, controls: RecordedControls) -> AsyncIterator[httpx.AsyncClient]:
    server = AdminServer(SocketNetwork(), SystemClock(), health, Metrics(CollectorRegistry()), controls)
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        yield client
    await server.close()


# health


def test_ready_needs_every_required_check(health: Health) -> None:
    assert health.not_ready() == {"process": "starting"}
    health.set("generate", HealthState.STARTING, "loading weights")
    health.set("tracing", HealthState.UNHEALTHY, "no collector", required=False)
    assert health.not_ready() == {"generate": "starting: loading weights"}
    health.set("generate", HealthState.READY)
    assert health.ready()
    for state in (HealthState.CORDONED, HealthState.DRAINING, HealthState.UNHEALTHY):
        health.set("generate", state)
        assert health.not_ready() == {"generate": state.value}
    health.remove("generate")
    assert not health.ready()


def test_healthy_until_a_check_is_unhealthy(health: Health) -> None:
    health.set("generate", HealthState.READY)
    assert health.healthy()
    health.set("generate", HealthState.UNHEALTHY, "engine died")
    assert not health.healthy()


# admin


async def test_probes_follow_health(client: httpx.AsyncClient, health: Health) -> None:
    health.set("generate", HealthState.STARTING)
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {
        "live": True,
        "ready": False,
        "not_ready": {"generate": "starting"},
        "checks": {"generate": {"state": "starting"}},
    }
    assert (await client.get("/live")).status_code == 200
    assert (await client.get("/health")).status_code == 200
    health.set("generate", HealthState.READY)
    assert (await client.get("/ready")).status_code == 200
    health.set("generate", HealthState.UNHEALTHY, "engine died")
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/live")).status_code == 200


async def test_metrics_count_the_admin_server_too(client: httpx.AsyncClient) -> None:
    await client.get("/live")
    text = (await client.get("/metrics")).text
    assert 'kvolt_http_requests_total{method="GET",server="admin",status="200"} 1.0' in text


async def test_controls_are_called_and_answer_with_the_status(
    client: httpx.AsyncClient, controls: RecordedControls
) -> None:
    assert (await client.post("/cordon")).json() == {"calls": 1}
    assert (await client.post("/drain?timeout_s=2.5")).json() == {"calls": 2}
    await client.post("/drain")
    assert controls.calls == ["cordon", ("drain", 2.5), ("drain", 30.0)]
    assert (await client.get("/status")).json() == {"calls": 3}
    refused = await client.post("/resume")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert (await client.get("/cordon")).status_code == 405


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf", "", "1e9"])
async def test_a_bad_drain_time_is_refused(
    client: httpx.AsyncClient, controls: RecordedControls, text: str
) -> None:
    answer = await client.post("/drain", params={"timeout_s": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout_s"
    assert controls.calls == []


@pytest.mark.parametrize("header", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}])
async def test_web_pages_cannot_use_the_controls(
    client: httpx.AsyncClient, controls: RecordedControls, header: dict[str, str]
) -> None:
    for path in ("/cordon", "/drain", "/resume", *COMMANDS):
        assert (await client.post(path, headers=header)).status_code == 403
    assert controls.calls == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/clear_kv_blocks", "clear_kv_blocks"),
        ("/v1/load_lora_adapter", "load_lora_adapter"),
        ("/v1/unload_lora_adapter", "unload_lora_adapter"),
    ],
)
async def test_commands_get_the_body_and_return_their_result(
    client: httpx.AsyncClient, controls: RecordedControls, path: str, name: str
) -> None:
    answer = await client.post(path, content=b'{"lora_name": "sql"}')
    assert (answer.status_code, answer.json()) == (200, {"cleared_blocks": 7})
    assert controls.calls == [(name, b'{"lora_name": "sql"}')]
    assert (await client.get(path)).status_code == 405


async def test_query_parameters_replace_the_body_of_a_command(
    client: httpx.AsyncClient, controls: RecordedControls
) -> None:
    """vLLM's clients send them: without this a level 2 would be a level 1."""
    await client.post("/sleep?level=2")
    assert controls.calls == [("sleep", b'{"level":"2"}')]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Unsupported("no KV here", feature="clear_kv_blocks"), 501),
        (InvalidRequest("no adapter there", param="lora_path"), 400),
        (NotFound("no such adapter", kind="lora", name="sql"), 404),
    ],
    ids=str,
)
async def test_a_command_that_is_refused_says_why(
    client: httpx.AsyncClient,
    controls: RecordedControls,
    monkeypatch: pytest.MonkeyPatch,
    error: KvoltError,
    status: int,
) -> None:
    async def refuse(name: str, body: bytes) -> object:
        raise error

    monkeypatch.setattr(controls, "command", refuse)
    refused = await client.post("/clear_kv_blocks")
    assert refused.status_code == status
    assert refused.json()["error"]["message"] == error.message
    assert refused.json()["error"]["code"] == error.code
