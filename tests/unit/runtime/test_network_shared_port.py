"""One port for several listeners: reserved without listening, shared by those who ask for it, kept from others."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from kvolt.core.errors import ConfigError
from kvolt.runtime.network import SocketNetwork, reserved_port


class Greeter(asyncio.Protocol):
    """Sends its name to every client."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._name)
        transport.close()


async def greeting(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_connections_are_spread_over_all_who_share_a_port() -> None:
    network = SocketNetwork(reuse_port=True)
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        address = f"127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):  # it is reserved, but without a listener
            await greeting(port)
        listeners = [
            await network.listen(address, lambda name=name: Greeter(name))  # type: ignore[misc]
            for name in (b"a", b"b")
        ]
        heard = {await greeting(port) for _ in range(64)}
        assert heard == {b"a", b"b"}
        await listeners[0].close()
        assert {await greeting(port) for _ in range(16)} == {b"b"}
        await listeners[1].close()


async def test_a_listener_without_sharing_gets_an_error() -> None:
    network = SocketNetwork(reuse_port=True)
    with reserved_port("127.0.0.1", 0) as port:
        listener = await network.listen(f"127.0.0.1:{port}", lambda: Greeter(b"a"))
        with pytest.raises(ConfigError, match="is already in use"):
            await SocketNetwork().listen(f"127.0.0.1:{port}", lambda: Greeter(b"c"))
        await listener.close()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match="is already in use"),
            reserved_port("127.0.0.1", port),
        ):
            pass


def test_an_address_of_another_machine_cannot_be_reserved() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"), reserved_port("192.0.2.1", 0):
        pass
