"""HTTP exchange of one choice: receives the response and reports outputs and failures to the engine.

Also converts outputs of a choice to step outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.errors import DeadlineExceeded, EngineDied, KvoltError, ProtocolError, WorkerLost
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import SequenceHash
from kvolt.core.request import Request
from kvolt.engines.external.answers import Choice, ChoiceOutput
from kvolt.engines.remote.dialect import AnswerReader
from kvolt.engines.remote.refusals import ENGINE, broken, refusal
from kvolt.runtime.http.client_call import HttpCall
from kvolt.runtime.http.sse import DONE, EventReader

_MAX_REFUSAL_BYTES = 64 << 10


class ExchangeOwner(Protocol):
    """Interface of the engine for exchanges."""

    url: str

    def on_output(self, exchange: EngineExchange, output: ChoiceOutput) -> None: ...

    def on_failed(self, exchange: EngineExchange, error: KvoltError) -> None: ...


class EngineExchange:
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
        self.call: HttpCall | None = None
        self.num_tokens = num_input
        """Tokens on the server: input and output."""
        self.has_started = False
        self.held_tokens: int | None = None
        """Prompt tokens in the server's cache when the request was sent, according to its KV events."""
        self.output: ChoiceOutput | None = None
        """Output since the last step output."""
        self.is_over = False
        """Whether the choice has ended; the connection may still be open."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status

    def data(self, pieces: list[bytes], now: float) -> None:
        if self._status != 200:
            if len(self._body) < _MAX_REFUSAL_BYTES:
                self._body += b"".join(pieces)
            return
        for piece in pieces:
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

    def end(self, now: float) -> None:
        url = self._owner.url
        if self._status != 200:
            self.fail(refusal(url, self._status, self._body))
        else:
            self.fail(broken(url, "closed the stream before the end of the answer"))

    def fail(self, error: KvoltError) -> None:
        if isinstance(error, ProtocolError):  # a fault of the server, not of the request
            error = broken(self._owner.url, f"sent a malformed response: {error.message}")
        elif isinstance(error, WorkerLost | DeadlineExceeded):
            error = EngineDied(error.message, engine=ENGINE)
        if not self.is_over:
            self._owner.on_failed(self, error)


def merge_outputs(first: ChoiceOutput, second: ChoiceOutput) -> ChoiceOutput:
    """Merge two consecutive outputs of one choice."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or ()) + second.logprobs
    return ChoiceOutput(
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        cached_tokens=first.cached_tokens if second.cached_tokens is None else second.cached_tokens,
    )


def without_cached_tokens(step: StepOutput) -> StepOutput:
    """Remove `cached_tokens`, for a server that does not report them: 0 would mean that nothing was cached."""
    if all(delta.cached_tokens is None for _, delta in step.deltas):
        return step
    deltas = tuple((request_id, replace(delta, cached_tokens=None)) for request_id, delta in step.deltas)
    return replace(step, deltas=deltas)


def held_tokens(request: Request, held: Collection[int], block_size: int) -> int:
    """Number of leading prompt tokens in blocks that the server holds."""
    if not held:
        return 0
    names: Sequence[SequenceHash] = request.sequence_hashes
    if request.block_size != block_size or not names:
        hasher = SequenceHasher(block_size, request_seed(request.lora, request.salt))
        names = hasher.extend(request.token_ids)
    num_held = next((index for index, name in enumerate(names) if name not in held), len(names))
    return num_held * block_size
