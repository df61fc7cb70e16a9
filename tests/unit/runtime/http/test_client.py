"""HttpClient without a server; responses are covered by the tests of attached servers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvolt.core.errors import ConnectFailed, EngineDied, KvoltError
from kvolt.runtime.http.client import HttpClient, ServerUrl


def broken(what: str) -> KvoltError:
    return EngineDied(what, engine="test")


async def test_it_does_not_talk_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give an unused port to the connecting client, which would keep the server from listening on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def from_there(*given, **more):
        return await connect(*given, **more, local_addr=("127.0.0.1", port))

    monkeypatch.setattr(loop, "create_connection", from_there)
    client = HttpClient(ServerUrl.parse(f"http://127.0.0.1:{port}"), None, 5.0, broken)
    with pytest.raises(ConnectFailed, match="connection refused"):
        await client.fetch("/health", 5.0)
    assert client.num_connections == 0
    await client.close()
