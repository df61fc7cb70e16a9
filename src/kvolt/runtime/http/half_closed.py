"""Watches a client that has ended its side of the connection while it waits for a response.

TCP announces `shutdown(SHUT_WR)`, after which a client still reads, and `close()`, after which it does not, by the same
FIN. They differ in what happens to later bytes: a closed client answers them with a reset, and the next write fails,
which ends the connection. So the connection writes what clients skip: interim responses (100 Continue) until the
response has started, then comments in a stream of events. HTTP/1.0 has no interim responses: keep-alive probes of the
kernel find a closed client within its FIN timeout, 60 s on Linux.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

_FIRST_S = 0.05
_MAX_S = 5.0


class HalfClosedWatch:
    """Calls `probe` at growing intervals until `stop`; aborts the transport once its socket has failed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, probe: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._probe = probe
        self._delay_s = _FIRST_S
        self._socket: socket.socket | None = transport.get_extra_info("socket")
        _enable_keep_alive(self._socket)
        self._timer = loop.call_later(self._delay_s, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if _has_failed(self._socket):
            self._transport.abort()
            return
        self._probe()
        self._delay_s = min(self._delay_s * 2, _MAX_S)
        self._timer = self._loop.call_later(self._delay_s, self._check)


def _enable_keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), int(_MAX_S))
    except OSError:
        pass  # some socket types have no such option


def _has_failed(sock: socket.socket | None) -> bool:
    """Whether a reset has arrived; asyncio does not read after the end of the client's data."""
    return sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
