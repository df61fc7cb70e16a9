"""Network port: byte streams between processes, used by the request plane and the HTTP server.

A protocol is an ordinary `asyncio.Protocol`, so the same connection code runs over sockets and over the in-memory
network of `kvolt.testing`.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

from kvolt.core.errors import ConfigError, ConnectFailed

ProtocolFactory = Callable[[], asyncio.Protocol]

_UNSENT_LOW_WATER_BYTES = 128 * 1024
"""Limit of unsent bytes in the kernel, which a delta cannot overtake."""


class Listener(Protocol):
    """A listening address. `address` is the bound one, with the port chosen by the system."""

    @property
    def address(self) -> str: ...

    async def close(self) -> None:
        """Stop accepting; connections already open stay open."""
        ...


class Network(Protocol):
    """Opens byte streams. Addresses are `host:port`; with port 0 the system chooses."""

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener: ...

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol: ...


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; raises ConfigError with a remedy if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"{address!r} is not an address", remedy="write HOST:PORT, for example 127.0.0.1:7400"
        )
    return host.strip("[]"), int(port)


def split_host(text: str) -> tuple[str, int | None]:
    """Split `host:port` or `[v6]:port`; the port is None for `host` or `v6` alone."""
    host, colon, port = text.rpartition(":")
    bare_v6 = ":" in host and not host.endswith("]")
    if not colon or not host or bare_v6 or not port.isdecimal():
        return text.strip("[]"), None
    return host.strip("[]"), int(port)


@lru_cache(maxsize=4096)
def peer_group(host: str) -> str:
    """Group of hosts that share one limit: an IPv4 address, the /64 of an IPv6 address, or another name unchanged.

    A host can choose among 2**64 IPv6 addresses, so a limit per IPv6 address would be ineffective.
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
    """Whether the host is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # another name, such as 127.0.0.1.example.com


def is_wildcard(host: str) -> bool:
    """Whether the host means every address of this machine: valid for listening, not for advertising."""
    return host in ("0.0.0.0", "::", "*", "")


def same_host(first: str, second: str) -> bool:
    """Whether two hosts are the same address or name; names are not resolved.

    Loopback and wildcard hosts are the same machine; an IPv4 address mapped into IPv6 equals the IPv4 address.
    """
    first, second = _canonical_host(first), _canonical_host(second)
    return first == second or all(is_loopback(host) or is_wildcard(host) for host in (first, second))


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
        # Not wait_closed(): from 3.12 on it waits for the open connections, which outlive the listener.
        self._server.close()


class SocketNetwork:
    """TCP over the running event loop.

    With `reuse_port`, several processes can listen on one port, and the system distributes new connections over them.
    `tls` is for outgoing connections.
    """

    def __init__(self, reuse_port: bool = False, tls: ssl.SSLContext | None = None) -> None:
        self._reuse_port = reuse_port
        self._tls = tls

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
            raise listen_error(address, error) from error
        return _SocketListener(server)

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        try:
            host, port = split_address(address)
        except ConfigError as error:  # malformed registration: to the caller it is an unreachable address
            raise ConnectFailed(error.message, address=address) from error
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, protocol = await loop.create_connection(factory, host, port, ssl=self._tls)
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid DNS name
            raise connect_error(address, error) from error
        return protocol


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve a port (0: any free one) for listeners with `reuse_port`, of this process and of others.

    The socket does not listen, so it gets no connections; it keeps the port reserved while no listener is running.
    """
    address = join_address(host, port)
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            "SO_REUSEPORT is not supported on this system",
            key="frontend.processes",
            remedy="leave frontend.processes at 1",
        )
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
    except OSError as error:
        raise listen_error(address, error) from error
    with holder:
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(socket_address)
        except OSError as error:
            raise listen_error(address, error) from error
        yield int(holder.getsockname()[1])


def tune_socket(transport: asyncio.BaseTransport) -> None:
    """Disable Nagle's algorithm, and limit unsent bytes in the kernel so that bulk data waits in this process."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_LOW_WATER_BYTES)
    except OSError:
        pass  # optional: some socket types do not support it


def connect_error(address: str, error: OSError | UnicodeError) -> ConnectFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"the certificate of {address} is not trusted: {error.verify_message}"
        remedy = "set SSL_CERT_FILE to a file with its certificate authority"
        return ConnectFailed(message, address=address, remedy=remedy)
    if isinstance(error, ssl.SSLError):
        return ConnectFailed(
            f"{address} does not speak TLS: {error.reason}", address=address, remedy="try http://"
        )
    # The error of a connection that ends during the TLS handshake has no text.
    reason = getattr(error, "strerror", None) or str(error) or "connection closed"
    if isinstance(error, ConnectionRefusedError):
        reason = "connection refused"
    return ConnectFailed(f"cannot connect to {address}: {reason}", address=address)


def listen_error(address: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{address} is already in use",
            key="port",
            remedy="choose another port, or 0 for any free one",
        )
    reason = error.strerror or str(error)
    return ConfigError(
        f"cannot listen on {address}: {reason}", key="host", remedy="use an address of this machine"
    )
