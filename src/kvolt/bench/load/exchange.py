"""Receiver of one streamed response: produces the request's Sample and classifies failures."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping

import msgspec

from kvolt.bench.load.answer import AnswerReader, OnGap, error_message
from kvolt.bench.load.sample import Failure, Sample
from kvolt.core.errors import Cancelled, ConnectFailed, DeadlineExceeded, KvoltError, ProtocolError
from kvolt.runtime.http.client_call import HttpCall

_MAX_REFUSAL_BYTES = 64 << 10
_FAILURES: dict[type[KvoltError], Failure] = {
    ConnectFailed: Failure.CONNECT,
    ProtocolError: Failure.PROTOCOL,
    Cancelled: Failure.INTERRUPTED,
}


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
    """Receives the response of one request and passes its Sample to `on_end`.

    If the response is complete, its gaps between tokens go to `on_gap` before.
    """

    def __init__(
        self,
        plan: RequestPlan,
        origin_s: float,
        now: Callable[[], float],
        on_gap: OnGap,
        on_end: Callable[[Exchange, Sample], None],
    ) -> None:
        self.plan = plan
        self.answer = AnswerReader(self._keep_gap, plan.keep_text)
        self.call: HttpCall | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._origin_s = origin_s
        self._now = now
        self._gaps_s = array("d")
        self._on_gap = on_gap
        self._on_end = on_end
        self._status = 0
        self._is_stream = False
        self._body = b""

    @property
    def has_started(self) -> bool:
        """Whether the first token has arrived."""
        return self.answer.num_events > 0

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def data(self, pieces: list[bytes], now: float) -> None:
        if self._is_stream:
            self.answer.feed(pieces, now)
        elif len(self._body) < _MAX_REFUSAL_BYTES:
            self._body += b"".join(pieces)

    def end(self, now: float) -> None:
        answer = self.answer
        if self._status != 200:
            self._finish(now, f"http_{self._status}", error_message(self._body))
        elif not self._is_stream:
            self._finish(now, Failure.NO_STREAM, "the server did not stream the response")
        else:
            try:
                answer.end(now)
            except ProtocolError as error:
                self.fail(error)
                return
            if answer.error is not None:
                self._finish(now, Failure.STREAM_ERROR, answer.error)
            elif not answer.is_complete:
                message = "the stream ended with neither a finish reason nor [DONE]"
                self._finish(now, Failure.BROKEN_STREAM, message)
            else:
                self._finish(now, None, None)

    def fail(self, error: KvoltError) -> None:
        kind = _FAILURES.get(type(error), Failure.HANG_UP)
        message = error.message
        if isinstance(error, DeadlineExceeded):
            is_first = error.fields.get("stage") == "first"
            kind = Failure.FIRST_TOKEN_TIMEOUT if is_first else Failure.TOTAL_TIMEOUT
        if self.answer.error is not None:  # some servers send an error and then close
            kind, message = Failure.STREAM_ERROR, self.answer.error
        self._finish(self._now(), kind, message)

    def _keep_gap(self, gap_s: float, times: int) -> None:
        if times == 1:
            self._gaps_s.append(gap_s)
        else:
            self._gaps_s.extend([gap_s] * times)

    def _finish(self, now: float, error: str | None, message: str | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if error is None:
            for gap_s in self._gaps_s:
                self._on_gap(gap_s, 1)
        plan, answer, origin_s = self.plan, self.answer, self._origin_s
        sent_at = self.call.sent_at if self.call is not None else None
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
            sent_s=None if sent_at is None else sent_at - origin_s,
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
