"""Network within one process: connections are socket pairs, and no port is opened."""

from __future__ import annotations

import asyncio
import socket
from itertools import count

from kvolt.core.errors import ConnectFailed
from kvolt.runtime.network import Listener, ProtocolFactory


class LocalNetwork:
    """Implements the Network port on one event loop. `listen` ignores its address and returns a unique one."""

    def __init__(self) -> None:
        self._factories: dict[str, ProtocolFactory] = {}
        self._numbers = count(1)

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        listener = _LocalListener(self._factories, f"local:{next(self._numbers)}")
        self._factories[listener.address] = factory
        return listener

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        accept = self._factories.get(address)
        if accept is None:
            raise ConnectFailed(f"nothing listens on {address} in this process", address=address)
        _, protocol = await _connect_pair(accept, factory)
        return protocol


async def _connect_pair(
    accept: ProtocolFactory, dial: ProtocolFactory
) -> tuple[asyncio.Protocol, asyncio.Protocol]:
    loop = asyncio.get_running_loop()
    ends = socket.socketpair()
    try:
        for end in ends:
            end.setblocking(False)
        _, accepted = await loop.create_unix_connection(accept, sock=ends[0])
        _, dialed = await loop.create_unix_connection(dial, sock=ends[1])
    except BaseException:
        for end in ends:
            end.close()
        raise
    return accepted, dialed


class _LocalListener:
    def __init__(self, factories: dict[str, ProtocolFactory], address: str) -> None:
        self._factories = factories
        self.address = address

    async def close(self) -> None:
        self._factories.pop(self.address, None)
