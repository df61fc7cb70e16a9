"""Sockets of agents: opened to a peer, and listened on, without ever waiting. Knows no message.

Names are looked up once, by who starts an agent. The thread that moves blocks sees numeric addresses only: a resolver
that is slow would stop all that moves.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.wire import Address

log = logging.getLogger(__name__)

_BACKLOG = 512
_CREDENTIALS = struct.Struct("3i")
"""Process, user, group."""
PAUSE_S = 1.0
"""Of one who listens, when there is no descriptor left for a peer."""

OnDone = Callable[[socket.socket | ConnectFailed], None]


def name_of(to: Address) -> str:
    return f"{to.host}:{to.port}"


def connect(progress: Progress, to: Address, use_unix: bool, on_done: OnDone) -> Callable[[], None]:
    """Open a connection; `on_done` is told how it went, once, perhaps before this returns. What is returned gives up:
    then it is not told any more."""
    named = to.unix if use_unix else name_of(to)
    link: socket.socket | None = None

    def failed(why: object) -> None:
        give_up()
        on_done(ConnectFailed(f"no connection to {named}: {why}", address=named))

    def give_up() -> None:
        nonlocal link
        if link is not None:
            progress.forget(link.fileno())
            link.close()
            link = None

    def done() -> None:
        nonlocal link
        assert link is not None
        if use_unix and not is_same_user(link):
            failed("it is of another user")
            return
        opened, link = link, None
        on_done(opened)

    def tried(events: int) -> None:
        if link is None:
            return
        progress.forget(link.fileno())
        code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            failed(os.strerror(code))
        else:
            done()

    try:
        where = f"\0{to.unix}" if use_unix else _numeric(to)
        link = _new_socket(socket.AF_UNIX if use_unix else family_of(to.host))
        code = link.connect_ex(where)
        if code == errno.EINPROGRESS:
            progress.watch(link.fileno(), EVENT_WRITE, tried)
    except (OSError, ValueError) as error:
        failed(error)
        return give_up
    if not code:
        done()
    elif code != errno.EINPROGRESS:  # EAGAIN, too: who listens at a Unix socket has too many waiting already
        failed(os.strerror(code))
    return give_up


def _numeric(to: Address) -> tuple[str, int]:
    if not is_numeric(to.host):
        raise ValueError("its host must be told as a numeric address")
    if not 0 < to.port < 1 << 16:
        raise ValueError("there is no such port")
    return to.host, to.port


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    link = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    link.setblocking(False)
    if family != socket.AF_UNIX:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def is_same_user(link: socket.socket) -> bool:
    """Whether the peer of a Unix socket is of the same user, or root. Who may map one slab of ours sees all of it; and
    anybody can listen at a name that an agent has left."""
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user in (0, os.getuid())


def host_of(link: socket.socket) -> str:
    """The address of a peer, without its port; one name for all that come over a Unix socket."""
    if link.family == socket.AF_UNIX:
        return "unix"
    try:
        return str(link.getpeername()[0])
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
    """The numeric address of a name, of this family if it has one. Waits for it. ConfigError where there is none."""
    if is_numeric(host):
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"peers cannot be told {host!r}: {error}",
            key="transfer.advertise",
            remedy="name an address of this machine that peers reach, or leave it to the host that is listened on",
        ) from None
    return str(min(found, key=lambda each: each[0] != family)[4][0])


# --- listening


def listen_tcp(host: str, port: int) -> socket.socket:
    """ConfigError when it cannot be."""
    listening = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"blocks cannot be served at {host}:{port}: {error.strerror}",
            key="transfer.port",
            remedy="name a free port, or 0 for any",
        ) from None
    return listening


def listen_unix(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{name}")
    listening.listen(_BACKLOG)
    listening.setblocking(False)
    return listening


class Listener:
    """Lets peers in, for as long as it is not closed, whatever goes wrong with one of them."""

    def __init__(
        self, progress: Progress, listening: socket.socket, on_peer: Callable[[socket.socket], None]
    ) -> None:
        """`on_peer` gets each socket, which is its own from then on."""
        self._progress = progress
        self._listening = listening
        self._on_peer = on_peer
        self._num_refused = 0
        self._is_closed = False

    def start(self) -> None:
        if not self._is_closed:
            self._progress.watch(self._listening.fileno(), EVENT_READ, self._on_ready)

    def close(self) -> None:
        self._is_closed = True
        self._progress.forget(self._listening.fileno())
        self._listening.close()

    def _on_ready(self, events: int) -> None:
        try:
            link, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor, or no memory, is left: who waits would be there again at once.
            log.warning("peers are not let in for %s s: %s", PAUSE_S, error)
            self._progress.forget(self._listening.fileno())
            self._progress.at(self._progress.now() + PAUSE_S, self.start)
            return
        try:
            link.setblocking(False)
            if link.family != socket.AF_UNIX:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            elif not is_same_user(link):
                raise PermissionError("it is of another user")
            self._on_peer(link)
        except Exception as error:
            self._num_refused += 1
            if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th ...: it may be an attack
                log.warning("connection refused: reason=%s refused=%d", error, self._num_refused)
            link.close()
