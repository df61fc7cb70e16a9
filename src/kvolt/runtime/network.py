"""Byte streams between processes: the port that the request plane and the HTTP server stand on.

A protocol is an ordinary `asyncio.Protocol`, so the same connection code runs over real sockets and
over the in-memory network of `kvolt.testing`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from kvolt.core.errors import ConfigError, ConnectFailed

ProtocolFactory = Callable[[], asyncio.Protocol]

_UNSENT_LOW_WATER_BYTES = 128 * 1024
"""Unsent bytes that may wait in the kernel: what waits there cannot be overtaken by a delta."""


class Listener(Protocol):
    """A listening address. `address` is the real one, with the port chosen by the system."""

    @property
    def address(self) -> str: ...

    async def close(self) -> None:
        """Stop accepting; connections already open stay open."""
        ...


class Network(Protocol):
    """Opens byte streams. Addresses are `host:port`; port 0 lets the system choose."""

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener: ...

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol: ...


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as a pair; ConfigError names the remedy when it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{address!r} is not an address", remedy="write HOST:PORT, for example 127.0.0.1:7400"
        )
    return host.strip("[]"), int(port)


def split_host(text: str) -> tuple[str, int | None]:
    """`host` or `v6` alone, or with a port as `host:port` or `[v6]:port`."""
    host, colon, port = text.rpartition(":")
    bare_v6 = ":" in host and not host.endswith("]")
    if not colon or not host or bare_v6 or not port.isdecimal():
        return text.strip("[]"), None
    return host.strip("[]"), int(port)


@lru_cache(maxsize=4096)
def peer_group(host: str) -> str:
    """Hosts that share one limit: an IPv4 address, the /64 of an IPv6 address, or any other name as it is.

    A host chooses among 2**64 addresses of its own, so a limit per IPv6 address is no limit.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), 64), strict=False))


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Reached from this machine only."""
    return host.startswith("127.") or host in ("localhost", "::1")


def is_wildcard(host: str) -> bool:
    """Every address of this machine: good to listen on, not to be told to others."""
    return host in ("0.0.0.0", "::", "*", "")


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are written as the same address or name; nothing is resolved.

    Loopback and wildcard hosts are all this machine; an IPv4 address mapped into IPv6 is that IPv4 address.
    """
    one, other = _canonical_host(one), _canonical_host(other)
    return one == other or all(is_loopback(host) or is_wildcard(host) for host in (one, other))


def _canonical_host(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
    return str(getattr(address, "ipv4_mapped", None) or address)


class _SocketListener:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        name = server.sockets[0].getsockname()
        self._address = join_address(name[0], name[1])

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        # Not wait_closed(): from 3.12 on it waits for the open connections, which outlive the listener here.
        self._server.close()


class SocketNetwork:
    """TCP over the running event loop. With `reuse_port` others that have it too may listen on the same port:
    the system spreads new connections over them."""

    def __init__(self, reuse_port: bool = False) -> None:
        self._reuse_port = reuse_port

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            server = await loop.create_server(
                factory,
                host,
                port,
                backlog=1024,
                reuse_address=True,
                reuse_port=self._reuse_port or None,
            )
        except OSError as error:
            raise _listen_error(address, error) from error
        return _SocketListener(server)

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        try:
            host, port = split_address(address)
        except ConfigError as error:  # somebody registered nonsense: to the caller just one that is not there
            raise ConnectFailed(error.message, address=address) from error
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(factory, host, port)
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectFailed(f"cannot connect to {address}: {reason}", address=address) from error
        return protocol


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Keep a port (0: any free one) for listeners with `reuse_port`, of this process and of others.

    Nothing listens here, so no connection comes; but the port stays ours while every listener is away.
    """
    address = join_address(host, port)
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            "this system lets only one process listen on a port",
            key="frontend.processes",
            remedy="leave frontend.processes at 1",
        )
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _listen_error(address, error) from error
    with holder:
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(place)
        except OSError as error:
            raise _listen_error(address, error) from error
        yield int(holder.getsockname()[1])


def tune_socket(transport: asyncio.BaseTransport) -> None:
    """Small writes leave at once, and bulk waits in our queue, not in the kernel's."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_LOW_WATER_BYTES)
    except OSError:
        pass  # a hint only: some socket kinds refuse it


def _listen_error(address: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{address} is taken by another process",
            key="port",
            remedy="choose another port, or 0 for any free one",
        )
    reason = error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {address}: {reason}", key="host", remedy="use an address of this machine"
    )
