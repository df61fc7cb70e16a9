"""Non-blocking sockets of agents: connect and listen; their addresses.

Host names are resolved once at startup. The progress thread uses numeric addresses only, since a slow resolver would
block all transfers.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE

from kvolt.core.errors import ConfigError, ConnectFailed, InvalidRequest
from kvolt.runtime.logs import is_logged
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.wire import Address

log = logging.getLogger(__name__)

_BACKLOG = 512
_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""
PROBE_S = 5.0
"""Delay before an unreachable socket is probed; doubled each time."""
_MAX_PROBE_S = 300.0
ACCEPT_PAUSE_S = 1.0
"""Pause in accepting when out of descriptors."""
_PATTERN = re.compile(
    r"(?P<agent>[\w-]{1,64})@(?:\[(?P<ipv6>[^\[\]\s]{2,64})\]|(?P<ipv4>[\d.]{7,15}))"
    r":(?P<port>\d{1,5})(?:/(?P<unix>[\w-]{1,100}))?",
    re.ASCII,
)

OnConnected = Callable[[socket.socket | ConnectFailed], None]


def host_port(address: Address) -> str:
    return f"{address.host}:{address.port}"


def connect(
    progress: ProgressThread, address: Address, use_unix: bool, on_done: OnConnected
) -> Callable[[], None]:
    """Connect; `on_done` is called once, possibly before this returns. Returns a function that cancels."""
    named = address.unix if use_unix else host_port(address)
    sock: socket.socket | None = None

    def fail(why: object) -> None:
        cancel()
        on_done(ConnectFailed(f"no connection to {named}: {why}", address=named))

    def cancel() -> None:
        nonlocal sock
        if sock is not None:
            progress.unwatch(sock.fileno())
            sock.close()
            sock = None

    def succeed() -> None:
        nonlocal sock
        assert sock is not None
        if use_unix and not is_same_user(sock):
            fail("it is of another user")
            return
        opened, sock = sock, None
        on_done(opened)

    def on_writable(events: int) -> None:
        if sock is None:
            return
        progress.unwatch(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            fail(os.strerror(code))
        else:
            succeed()

    try:
        target = f"\0{address.unix}" if use_unix else _numeric_address(address)
        sock = _new_socket(socket.AF_UNIX if use_unix else family_of(address.host))
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            progress.watch(sock.fileno(), EVENT_WRITE, on_writable)
    except (OSError, ValueError) as error:
        fail(error)
        return cancel
    if not code:
        succeed()
    elif code != errno.EINPROGRESS:  # also EAGAIN: the backlog of a Unix socket is full
        fail(os.strerror(code))
    return cancel


def _numeric_address(address: Address) -> tuple[str, int]:
    if not is_numeric(address.host):
        raise ValueError("host must be a numeric address")
    if not 0 < address.port < 1 << 16:
        raise ValueError("port out of range")
    return address.host, address.port


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def is_same_user(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket has the same user, or root. Mapping one slab exposes all of it, and any process
    can listen on a name that an agent has released."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.getuid())


def host_of(sock: socket.socket) -> str:
    """Peer address without port; `unix` for Unix sockets."""
    if sock.family == socket.AF_UNIX:
        return "unix"
    try:
        return str(sock.getpeername()[0])
    except OSError:  # gone already
        return "?"


def is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def resolve(host: str, family: socket.AddressFamily) -> str:
    """Numeric address of a name, preferably of this family. Blocks. ConfigError if it does not resolve."""
    if is_numeric(host):
        return host
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot advertise {host!r}: {error}",
            key="transfer.advertise",
            remedy="set an address of this machine that peers can reach, or leave it unset",
        ) from None
    return str(min(addresses, key=lambda each: each[0] != family)[4][0])


class SocketProbe:
    """Probes an unreachable Unix socket with exponential backoff, until it answers or the probe is closed."""

    def __init__(self, progress: ProgressThread, address: Address, on_reachable: Callable[[], None]) -> None:
        self._progress = progress
        self._address = address
        self._on_reachable = on_reachable
        self._after_s = PROBE_S
        self._is_closed = False
        self._cancel: Callable[[], None] = self._schedule()

    def close(self) -> None:
        self._is_closed = True
        self._cancel()

    def _schedule(self) -> Callable[[], None]:
        return self._progress.call_at(self._progress.now() + self._after_s, self._connect).cancel

    def _connect(self) -> None:
        self._cancel = _nothing
        cancel = connect(self._progress, self._address, True, self._on_result)
        if self._cancel is _nothing and not self._is_closed:
            self._cancel = cancel

    def _on_result(self, result: socket.socket | ConnectFailed) -> None:
        if isinstance(result, ConnectFailed):
            self._after_s = min(2 * self._after_s, _MAX_PROBE_S)
            self._cancel = self._schedule()
        else:
            result.close()
            self._is_closed = True
            self._on_reachable()


def _nothing() -> None: ...


# --- addresses as text


def format_address(address: Address) -> str:
    """Text form of an agent's address, for registrations and requests.

        AGENT@HOST:PORT/UNIX    3f2a90c1d4e5b677@10.0.0.7:41213/kvolt-transfer-3f2a90c1d4e5b677

    HOST is numeric, in brackets for IPv6. An agent without a Unix socket omits the slash and what follows.
    """
    host = f"[{address.host}]" if ":" in address.host else address.host
    unix = f"/{address.unix}" if address.unix else ""
    return f"{address.agent}@{host}:{address.port}{unix}"


def parse_address(text: str) -> Address:
    """Parse `format_address` output. InvalidRequest if malformed."""
    match = _PATTERN.fullmatch(text)
    if match is not None:
        host, port = match["ipv6"] or match["ipv4"], int(match["port"])
        is_ipv6 = match["ipv6"] is not None
        if is_numeric(host) and (":" in host) == is_ipv6 and 0 < port < 1 << 16:
            return Address(match["agent"], host, port, match["unix"] or "")
    raise InvalidRequest(
        f"{text[:200]!r} is not an agent address: expected AGENT@HOST:PORT/UNIX",
        param="address",
    )


# --- listening


def listen_tcp(host: str, port: int) -> socket.socket:
    """ConfigError if the address is unavailable."""
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            key="transfer.port",
            remedy="name a free port, or 0 for any",
        ) from None
    return sock


def listen_unix(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


class Listener:
    """Accepts peers until closed; an error of one peer does not affect others."""

    def __init__(
        self, progress: ProgressThread, sock: socket.socket, on_peer: Callable[[socket.socket], None]
    ) -> None:
        """`on_peer` takes ownership of each socket."""
        self._progress = progress
        self._socket = sock
        self._on_peer = on_peer
        self._num_refused = 0
        self._is_closed = False

    def start(self) -> None:
        if not self._is_closed:
            self._progress.watch(self._socket.fileno(), EVENT_READ, self._on_ready)

    def close(self) -> None:
        self._is_closed = True
        self._progress.unwatch(self._socket.fileno())
        self._socket.close()

    def _on_ready(self, events: int) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors or memory: pause, or accept would spin.
            log.warning("accept paused: seconds=%s error=%s", ACCEPT_PAUSE_S, error)
            self._progress.unwatch(self._socket.fileno())
            self._progress.call_at(self._progress.now() + ACCEPT_PAUSE_S, self.start)
            return
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            elif not is_same_user(sock):
                raise PermissionError("it is of another user")
            self._on_peer(sock)
        except Exception as error:
            self._num_refused += 1
            if is_logged(self._num_refused):
                log.warning("connection refused: reason=%s refused=%d", error, self._num_refused)
            sock.close()
