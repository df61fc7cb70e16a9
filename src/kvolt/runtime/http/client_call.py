"""One call of the HTTP client: its request, its receiver and its timeout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvolt.core.errors import DeadlineExceeded, KvoltError
from kvolt.runtime.lazy_timer import LazyTimer


class Receiver(Protocol):
    """Receives the response of a call. `end` or `fail` is the last callback; abandoned calls get neither."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers, with names in lower case."""
        ...

    def data(self, pieces: list[bytes], now: float) -> None:
        """Receive parts of the body that arrived together. Raising a KvoltError ends the call; it is then passed to
        `fail`."""
        ...

    def end(self, now: float) -> None: ...

    def fail(self, error: KvoltError) -> None:
        """ConnectFailed: nothing was sent. WorkerLost: the connection ended early. DeadlineExceeded: a timeout.
        ProtocolError: the response is not valid."""
        ...


class Timeouts(msgspec.Struct, frozen=True):
    first_s: float
    """From the start of the call to the first byte of the body."""
    between_s: float


class ClientConnection(Protocol):
    """A connection as its call sees it."""

    def drop(self) -> None:
        """Close immediately without callbacks."""
        ...


@dataclass(slots=True, eq=False)
class HttpCall:
    """One request in progress."""

    request: bytes
    receiver: Receiver
    timeouts: Timeouts | None
    server: str
    """URL of the server, for messages."""
    withdraw: Callable[[HttpCall], None]
    """Removes the call from its connection, or from those that wait for one."""
    timer: LazyTimer | None = None
    connection: ClientConnection | None = None
    num_sent: int = 0
    sent_at: float | None = None
    """Time at which the request was written."""
    last_byte_at: float = 0.0
    """Time of the last body bytes; 0 before the first."""
    is_over: bool = False

    def abandon(self) -> None:
        """Cancel the call without notifying its receiver."""
        if not self.is_over:
            self.finish()
            self.withdraw(self)

    def finish(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.close()

    def fail(self, error: KvoltError) -> None:
        if not self.is_over:
            self.abandon()
            self.receiver.fail(error)

    def arm(self) -> None:
        """Restart the timeout."""
        if self.timer is not None and self.timeouts is not None:
            self.timer.arm(self.timeouts.between_s if self.last_byte_at else self.timeouts.first_s)

    def on_timeout(self) -> None:
        assert self.timeouts is not None
        stage, limit_s = (
            ("between", self.timeouts.between_s) if self.last_byte_at else ("first", self.timeouts.first_s)
        )
        message = f"{self.server} was silent for {limit_s:g} s"
        self.fail(DeadlineExceeded(message, stage=stage, after_s=limit_s))
