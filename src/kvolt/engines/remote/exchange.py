"""HTTP exchange of one choice: receives the response and reports outputs and failures to the engine."""

from __future__ import annotations

from typing import Protocol

from kvolt.core.errors import KvoltError, ProtocolError
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.remote.dialect import AnswerReader
from kvolt.engines.remote.events import DONE, EventReader
from kvolt.engines.remote.refusals import broken, refusal
from kvolt.runtime.http.client import Call

_MAX_REFUSAL_BYTES = 64 << 10


class ExchangeOwner(Protocol):
    """Interface of the engine for exchanges."""

    url: str

    def on_output(self, exchange: Exchange, output: ChoiceOutput) -> None: ...

    def on_failed(self, exchange: Exchange, error: KvoltError) -> None: ...


class Exchange:
    """Implements `Receiver` of `runtime.http.client`."""

    __slots__ = (
        "_body",
        "_events",
        "_owner",
        "_reader",
        "_status",
        "call",
        "choice",
        "has_started",
        "held_tokens",
        "is_over",
        "num_tokens",
        "output",
    )

    def __init__(self, owner: ExchangeOwner, choice: Choice, reader: AnswerReader, num_input: int) -> None:
        self._owner = owner
        self._reader = reader
        self._events = EventReader()
        self._status = 0
        self._body = b""
        self.choice = choice
        self.call: Call | None = None
        self.num_tokens = num_input
        """Tokens on the server: input and output."""
        self.has_started = False
        self.held_tokens: int | None = None
        """Prompt tokens in the server's cache when the request was sent, according to its KV events."""
        self.output: ChoiceOutput | None = None
        """Output since the last step output."""
        self.is_over = False
        """Whether the choice has ended; the connection may still be open."""

    def head(self, status: int) -> None:
        self._status = status

    def data(self, piece: bytes) -> None:
        if self._status != 200:
            if len(self._body) < _MAX_REFUSAL_BYTES:
                self._body += piece
            return
        for event in self._events.feed(piece):
            if self.is_over:
                return
            output = self._reader.end() if event == DONE else self._reader.read(event)
            if output is not None:
                self._owner.on_output(self, output)

    @property
    def is_answered(self) -> bool:
        """Whether the server has sent the whole answer, so that the connection can be reused."""
        return not self._reader.was_cut

    def end(self) -> None:
        url = self._owner.url
        if self._status != 200:
            self.fail(refusal(url, self._status, self._body))
        else:
            self.fail(broken(url, "closed the stream before the end of the answer"))

    def fail(self, error: KvoltError) -> None:
        if isinstance(error, ProtocolError):  # a fault of the server, not of the request
            error = broken(self._owner.url, f"sent a malformed response: {error.message}")
        if not self.is_over:
            self._owner.on_failed(self, error)
