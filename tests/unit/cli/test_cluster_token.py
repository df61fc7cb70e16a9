"""`kvolt cluster token`, and a worker that joins with it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvolt.cli.main import main
from kvolt.cli.process import running
from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.security.join_token import MAX_TTL_S, parse_token

GENERATE = EndpointAddress("default", "m-decode-1", "generate")


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["cluster", "init"]) == 0
    capsys.readouterr()
    return tmp_path / "kvolt.key"


def settings(folder: Path, *given: str) -> Settings:
    overrides = [Override(name, text, name) for name, _, text in (each.partition("=") for each in given)]
    return load(environ={}, cwd=folder, overrides=overrides).settings


def test_it_prints_one_line(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "token", "--role", "pool", "--ttl", "2h", str(key)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    token = parse_token(text)
    assert token.role is ProcessRole.POOL
    assert token.fingerprint.hex().startswith(ClusterAuthority.load(key).fingerprint)
    assert 7000 < token.expires_at - SystemClock().wall() <= 7200


@pytest.mark.parametrize("ttl", ["0", "169h", "soon", str(MAX_TTL_S + 1)])
def test_other_lifetimes_are_refused(key: Path, ttl: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "token", "--ttl", ttl]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("role", ["client", "authority", ""])
def test_other_roles_are_refused(key: Path, role: str) -> None:
    assert main(["cluster", "token", "--role", role]) == 2


async def test_a_worker_joins_with_a_token(
    key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is discovered, its endpoint answers, and events of both arrive at the other."""
    assert main(["cluster", "token"]) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        join = f"127.0.0.1:{free.getsockname()[1]}"
    server = settings(
        tmp_path,
        f"cluster.key={key}",
        f"discovery.join_listen={join}",
        f"discovery.path={tmp_path / 'discovery'}",
        "admin.enabled=false",
    )
    member = settings(
        tmp_path,
        f"cluster.join_token={capsys.readouterr().out.strip()}",
        f"discovery.join={join}",
        "admin.enabled=false",
    )
    async with (
        asyncio.timeout(60),
        running(server, "frontend", ProcessRole.FRONTEND) as frontend,
        running(member, "worker-0", ProcessRole.WORKER) as worker,
    ):
        await worker.runtime.serve_streams(GENERATE, lambda stream: stream.end())
        client = await frontend.runtime.client(GENERATE)
        while not client.instances():
            await asyncio.sleep(0.02)
        stream, event = frontend.runtime.events.subscribe("kv"), None
        while event is None:
            worker.runtime.events.publish("kv", b"x")
            try:
                async with asyncio.timeout(0.05):
                    event = await anext(stream)
            except TimeoutError:
                continue
        assert event.publisher == worker.runtime.events.publisher
        assert event.identity.startswith("kvolt://worker/worker-0.")
        await stream.aclose()
        with pytest.raises(ConfigError, match="used before"):
            async with running(member, "worker-1", ProcessRole.WORKER):
                pass


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "needs the address of a join server"),
        (["cluster.key=kvolt.key"], "for processes without a key"),
        (["discovery.join=127.0.0.1:1"], "not one of this version"),
    ],
)
async def test_a_token_that_cannot_be_used_is_refused_at_start(
    tmp_path: Path, given: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with running(
            settings(tmp_path, "cluster.join_token=kvolt-join-x", *given), "a", ProcessRole.WORKER
        ):
            pass
