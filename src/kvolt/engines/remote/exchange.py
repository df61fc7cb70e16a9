"""Exchange: one choice's way to the server and back. Owns what has come of it; tells the engine in its words."""

from __future__ import annotations

from typing import Protocol

from kvolt.core.errors import KvoltError, ProtocolError
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.remote.dialect import AnswerReader
from kvolt.engines.remote.events import DONE, EventReader
from kvolt.engines.remote.refusals import broken, refusal
from kvolt.runtime.http.client import Call

_MAX_REFUSAL_BYTES = 64 << 10


class Teller(Protocol):
    """The engine, as far as an exchange knows it."""

    url: str

    def heard(self, exchange: Exchange, news: News) -> None: ...

    def failed(self, exchange: Exchange, error: KvoltError) -> None: ...


class Exchange:
    """A Receiver (see `http_client`)."""

    __slots__ = (
        "_body",
        "_events",
        "_reader",
        "_status",
        "_teller",
        "call",
        "choice",
        "has_begun",
        "held_tokens",
        "is_over",
        "news",
        "num_tokens",
    )

    def __init__(self, teller: Teller, choice: Choice, reader: AnswerReader, num_given: int) -> None:
        self._teller = teller
        self._reader = reader
        self._events = EventReader()
        self._status = 0
        self._body = b""
        self.choice = choice
        self.call: Call | None = None
        self.num_tokens = num_given
        """That the server has of it: what it was given and what it said."""
        self.has_begun = False
        self.held_tokens: int | None = None
        """Of the prompt, what the server held when it was asked, as far as it has told."""
        self.news: News | None = None
        """What came and is not told yet: all of it is told at once, with the next step."""
        self.is_over = False
        """The choice has ended, one way or another; the connection may still be about to."""

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
            news = self._reader.end() if event == DONE else self._reader.read(event)
            if news is not None:
                self._teller.heard(self, news)

    @property
    def is_answered(self) -> bool:
        """Whether the server has said all that it will: then its connection ends by itself, and is used again."""
        return not self._reader.was_cut

    def end(self) -> None:
        url = self._teller.url
        if self._status != 200:
            self.fail(refusal(url, self._status, self._body))
        else:
            self.fail(broken(url, "ended an answer in the middle"))

    def fail(self, error: KvoltError) -> None:
        if isinstance(error, ProtocolError):  # of a server: another one may speak better
            error = broken(self._teller.url, f"sent what is no answer: {error.message}")
        if not self.is_over:
            self._teller.failed(self, error)
