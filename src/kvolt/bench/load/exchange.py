"""Handler of one streamed response: produces the request's Sample and classifies failures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvolt.bench.load.answer import AnswerReader, OnGap, error_message
from kvolt.bench.load.http_reader import BodyReader
from kvolt.bench.load.sample import Failure, Sample

_MAX_REFUSAL_BYTES = 64 << 10


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a request before it is sent; times from the start of the run."""

    number: int
    session: int
    turn: int
    due_s: float
    started_s: float
    input_tokens: int
    keep_text: bool = False


class Exchange:
    """Receives the response of one request and passes its Sample to `on_end`."""

    def __init__(
        self,
        plan: RequestPlan,
        origin_s: float,
        on_gap: OnGap,
        on_end: Callable[[Exchange, Sample], None],
    ) -> None:
        self.plan = plan
        self.answer = AnswerReader(on_gap, plan.keep_text)
        self._origin_s = origin_s
        self._on_end = on_end
        self._status = 0
        self._is_stream = False
        self._body = b""
        self._sent_at: float | None = None

    @property
    def has_started(self) -> bool:
        return self.answer.num_events > 0

    def sent(self, now: float) -> None:
        self._sent_at = now

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> BodyReader:
        self._status = status
        self._is_stream = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        return self.answer.feed if self._is_stream else self._keep

    def _keep(self, pieces: list[bytes], now: float) -> None:
        if len(self._body) < _MAX_REFUSAL_BYTES:
            self._body += b"".join(pieces)

    def end(self, now: float) -> None:
        answer = self.answer
        if self._status != 200:
            self._over(now, f"http_{self._status}", error_message(self._body))
        elif not self._is_stream:
            self._over(now, Failure.NO_STREAM, "the server did not stream the response")
        else:
            answer.end(now)
            if answer.error is not None:
                self._over(now, Failure.STREAM_ERROR, answer.error)
            elif not answer.whole:
                self._over(
                    now, Failure.BROKEN_STREAM, "the stream ended with neither a finish reason nor [DONE]"
                )
            else:
                self._over(now, None, None)

    def fail(self, kind: str, message: str, now: float) -> None:
        if self.answer.error is not None:  # some servers send an error and then close
            kind, message = Failure.STREAM_ERROR, self.answer.error
        self._over(now, kind, message)

    def _over(self, now: float, error: str | None, message: str | None) -> None:
        plan, answer, origin_s = self.plan, self.answer, self._origin_s
        usage = answer.usage
        details = usage.prompt_tokens_details if usage is not None else None
        num_input = usage.prompt_tokens if usage is not None else None
        num_output = usage.completion_tokens if usage is not None else None
        num_events = answer.num_events
        sample = Sample(
            number=plan.number,
            session=plan.session,
            turn=plan.turn,
            due_s=plan.due_s,
            started_s=plan.started_s,
            sent_s=None if self._sent_at is None else self._sent_at - origin_s,
            first_s=answer.first_s - origin_s if num_events else None,
            second_s=answer.second_s - origin_s if num_events > 1 else None,
            last_s=answer.last_s - origin_s if num_events else None,
            end_s=now - origin_s,
            max_gap_s=answer.max_gap_s,
            num_events=num_events,
            input_tokens=plan.input_tokens if num_input is None else num_input,
            output_tokens=num_events if num_output is None else num_output,
            cached_tokens=None if details is None else details.cached_tokens,
            error=None if error is None else str(error),
            message=message,
        )
        self._on_end(self, sample)
