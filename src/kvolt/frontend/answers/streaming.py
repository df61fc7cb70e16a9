"""Streaming answer: server-sent events, written to the connection as tokens arrive.

Most tokens are plain: no buffering, parsing or metadata. `TokenFanOut` writes those of a whole engine step in one loop;
everything else goes through `on_item`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.frontend.answers.answer import Answer, AnswerSpec, ChoiceState, PromptReceiver
from kvolt.frontend.answers.choice import ChoiceOutput
from kvolt.frontend.metrics.request_record import RequestRecord
from kvolt.frontend.openai_api.errors import error_event
from kvolt.frontend.openai_api.serializer import DONE, Envelope, encode
from kvolt.frontend.parsers.port import Content
from kvolt.runtime.http.writer import CHUNK_HEADS, NUM_CHUNK_HEADS, ResponseWriter, chunk_head
from kvolt.runtime.plane.streams import Sink, StepSink

_LINE_END = b"\r\n"

log = logging.getLogger(__name__)


def _ignore() -> None:
    pass


class TokenFanOut:
    """Writes the plain tokens of an engine step to all answers of a process."""

    def __init__(
        self, now: Callable[[], float], observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._now = now
        self._observe = observe
        """Receives the duration of each step, from tokens to events."""

    def on_step(self, sinks: Sequence[Sink], token_ids: Sequence[int]) -> None:
        now = self._now()
        observer: RequestRecord | None = None
        last_at, num_alike = 0.0, 0
        for each, token_id in zip(sinks, token_ids, strict=True):
            receiver = cast(StreamingReceiver, each)
            write = receiver.write
            if write is None:
                receiver.on_token(token_id)
                continue
            text = receiver.plain_json[token_id]
            if not text:
                receiver.on_token(token_id)
                continue
            size = receiver.size + len(text)
            head = CHUNK_HEADS[size] if size < NUM_CHUNK_HEADS else chunk_head(size)
            write(b"%b%b%b%b" % (head, receiver.before, text, receiver.after))
            receiver.token_ids.append(token_id)
            if receiver.last_at != last_at:  # sequences of one batch share the time of their previous token
                if observer is not None:
                    observer.on_token_gap(now - last_at, num_alike)
                observer, last_at, num_alike = receiver.observer, receiver.last_at, 0
            num_alike += 1
            receiver.last_at = now
        if observer is not None:
            observer.on_token_gap(now - last_at, num_alike)
        self._observe(self._now() - now)


class StreamingReceiver(PromptReceiver):
    __slots__ = ("after", "before", "observer", "plain_json", "size", "token_ids", "write")

    answer: StreamingAnswer

    def __init__(self, answer: StreamingAnswer, states: list[ChoiceState], steps: StepSink | None) -> None:
        super().__init__(answer, states, steps)
        spec = answer.spec
        self.observer = spec.observer
        self.plain_json = spec.vocabulary.plain_json
        before, after = answer.envelope.plain(spec.serializer, states[0].index)
        self.size = len(before) + len(after)
        self.before, self.after = before, after + _LINE_END
        self.write: Callable[[bytes], None] | None = None
        """Fast path: set while plain tokens can be written directly."""
        self.token_ids = states[0].token_ids
        """All tokens of the first choice. Those written on the fast path are not yet counted by the choice."""

    def on_token(self, token_id: int) -> None:
        """Process a plain token off the fast path."""
        self.on_item(Delta((token_id,)))

    def on_item(self, delta: Delta) -> None:
        if self.write is not None and delta == Delta(delta.token_ids):
            self._on_plain_tokens(delta.token_ids)
            return
        try:
            self.on_delta(delta)
        except Exception as fault:  # as in the base class, without a call
            self.answer.fail_internal(fault)

    def _on_plain_tokens(self, token_ids: tuple[int, ...]) -> None:
        """Write one event per token of a delta that has only tokens (several when deltas were merged)."""
        num_plain = 0
        for token_id in token_ids:
            text = self.plain_json[token_id]
            if not text or self.write is None:
                break
            self.write(b"%b%b%b%b" % (chunk_head(self.size + len(text)), self.before, text, self.after))
            self.token_ids.append(token_id)
            num_plain += 1
        if num_plain:
            self.last_at = self.answer.observe(self.last_at, num_plain, first=False)
        if num_plain < len(token_ids):
            self.leave_fast_path()
            self.on_item(Delta(token_ids[num_plain:]))

    def on_delta(self, delta: Delta) -> None:
        answer = self.answer
        if not 0 <= delta.index < len(self.states):
            return
        self.last_at = answer.observe(self.last_at, len(delta.token_ids), first=not self.has_started)
        if not self.has_started:
            self.has_started = True
            answer.write_echo(self, delta)
        answer.record_delta(delta)
        state = self.states[delta.index]
        self.leave_fast_path()
        state.token_ids.extend(delta.token_ids)
        outputs = state.choice.feed_delta(delta)
        answer.write_outputs(state, outputs)
        ended_here = state.choice.finish is not None and (delta.finish is None or len(self.states) > 1)
        if outputs and ended_here and all(each.choice.finish is not None for each in self.states):
            answer.stop_receiver(self)
        self.write = answer.plain_writer(self)

    def on_end(self, error: KvoltError | None) -> None:
        self.leave_fast_path()
        super().on_end(error)

    def truncate(self, state: ChoiceState, last: Delta) -> None:
        if not self.has_started:
            self.has_started = True
            self.answer.write_echo(self, last)
        self.answer.write_outputs(state, state.choice.feed_delta(last))

    def leave_fast_path(self) -> None:
        """Update the choice with the tokens written on the fast path; the next token goes through the choice."""
        if self.write is not None:
            self.states[0].choice.num_tokens = len(self.token_ids)
            self.write = None


class StreamingAnswer(Answer[StreamingReceiver]):
    """Writes the events of one HTTP response. `done` is set when the last one is written."""

    def __init__(self, spec: AnswerSpec, writer: ResponseWriter, steps: StepSink | None) -> None:
        self._steps = steps
        self._writer = writer
        self.envelope = Envelope(spec.envelope_fields(spec.serializer.chunk), spec.include_usage)
        self.failure: KvoltError | None = None
        """Error sent inside the stream."""
        self._only_text = not (
            spec.with_logprobs or spec.continuous_usage or "completion_token_ids" in spec.extra_fields
        )
        super().__init__(spec)
        writer.on_pause = self._pause
        writer.on_resume = self._resume

    def new_receiver(self, states: list[ChoiceState]) -> StreamingReceiver:
        return StreamingReceiver(self, states, self._steps)

    def cancel(self) -> None:
        super().cancel()
        for receiver in self.receivers:
            receiver.leave_fast_path()

    def close(self) -> None:
        super().close()
        self._writer.on_pause = self._writer.on_resume = _ignore

    def send_headers(self) -> None:
        """Send headers and annotation events, once; later errors are sent inside the stream."""
        if self._writer.head_sent or self.done.done():
            return
        for name, value in self.spec.timing_headers().items():
            self._writer.add_header(name, value)
        events = [
            b"event: %b\n: %b\n\n" % (name.encode(), encode(value)) for name, value in self.spec.annotations
        ]
        if events:
            self._writer.write(b"".join(events))
        else:
            self._writer.send_head()

    def write_echo(self, receiver: StreamingReceiver, first: Delta) -> None:
        """Write the echoed prompt at the start of each choice, with its log probabilities."""
        spec = self.spec
        if not spec.echo:
            return
        number = self.receivers.index(receiver)
        logprobs = None
        if spec.with_logprobs:
            placed = self.prompt_token_texts(number, first.prompt_logprobs or ())
            logprobs = spec.serializer.logprobs(spec.vocabulary, placed, 0)
        self.send_headers()
        for state in receiver.states:
            choice = spec.serializer.text_choice(state.index, spec.echo[number], None, logprobs, True)
            self._writer.write(self._event(state, choice))
            state.role_sent = True
            state.num_echoed = len(spec.echo[number])

    def write_outputs(self, state: ChoiceState, outputs: Sequence[ChoiceOutput]) -> None:
        events = self._events(state, outputs)
        if events:
            self.send_headers()
            for event in events:
                self._writer.write(event)

    def plain_writer(self, receiver: StreamingReceiver) -> Callable[[bytes], None] | None:
        """Writer of the fast path, or None if the next token must go through the choice."""
        writer = self._writer
        state = receiver.states[0]
        if (
            not self._only_text
            or len(receiver.states) > 1
            or not writer.chunked
            or writer.disconnected
            or not state.role_sent
            or not state.choice.is_clean
        ):
            return None
        return writer.write_framed

    def finish(self) -> None:
        self._write_last()
        self.done.set_result(None)

    def fail(self, error: KvoltError) -> None:
        """End with an error: raised from `done` before the headers are sent, else sent as the last event."""
        if self.done.done():
            return
        self.cancel()
        if not self._writer.head_sent:
            super().fail(error)
            return
        self.failure = error
        log.warning(
            "stream failed: request_id=%s code=%s error=%s", self.spec.request_id, error.code, error.message
        )
        self._writer.write(error_event(error))  # without [DONE]: the answer is incomplete
        self._writer.end()
        self.done.set_result(None)

    # ---

    def _write_last(self) -> None:
        self.send_headers()
        states = self.states
        more: dict[str, Any] = {}
        if self.spec.include_usage:
            more["usage"] = self.usage(states)
        more.update(self.extras(states))
        last = self.envelope.last_event(more) if more else b""
        self._writer.write(last + DONE)
        self._writer.end()

    def _events(self, state: ChoiceState, outputs: Sequence[ChoiceOutput]) -> list[bytes]:
        """One event per piece; the finish reason goes with the last text."""
        serializer, vocabulary = self.spec.serializer, self.spec.vocabulary
        choices: list[dict[str, Any]] = []
        for output in outputs:
            if output.logprobs:
                state.pending_logprobs.extend(output.logprobs)
            for piece in output.pieces:
                first = not state.role_sent
                state.role_sent = True
                if isinstance(piece, Content):
                    logprobs = None
                    if state.pending_logprobs:
                        logprobs = serializer.logprobs(vocabulary, state.pending_logprobs, state.num_echoed)
                        state.pending_logprobs = []
                    choices.append(serializer.text_choice(state.index, piece.text, None, logprobs, first))
                else:
                    choices.append(serializer.piece_choice(state.index, piece, first))
        finish = self.finish_reason(state.choice)
        if finish is not None and outputs:
            if not choices or "content" not in choices[-1].get("delta", {"content": ""}):
                choices.append(serializer.text_choice(state.index, "", None, None, not state.role_sent))
                state.role_sent = True
            if state.pending_logprobs and choices[-1]["logprobs"] is None:
                choices[-1]["logprobs"] = serializer.logprobs(
                    vocabulary, state.pending_logprobs, state.num_echoed
                )
                state.pending_logprobs = []
            choices[-1]["finish_reason"] = finish
            if state.choice.stop_reason is not None:
                choices[-1]["stop_reason"] = state.choice.stop_reason
        return [self._event(state, choice) for choice in choices]

    def _event(self, state: ChoiceState, choice: dict[str, Any]) -> bytes:
        if not self.spec.continuous_usage:
            return self.envelope.event(choice)
        return self.envelope.event(choice, {"usage": self.usage(self.states)})

    def _pause(self) -> None:
        for journey in self._journeys:
            journey.hold()

    def _resume(self) -> None:
        for journey in self._journeys:
            journey.release()
