"""An answer as a stream of events, written to its connection as tokens come.

Most tokens are plain: nothing held back, nothing to parse, nothing to say but their text. Those are
written by `TokenFan` for a whole engine step in one loop; everything else goes through `on_item`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.frontend.answers.answer import Answer, ChoiceState, Observer, Plan, cut_short, heard_of, unfinished
from kvolt.frontend.answers.choice import Told
from kvolt.frontend.openai_api.errors import error_event
from kvolt.frontend.openai_api.serializer import DONE, Envelope, encode
from kvolt.frontend.parsers.port import Content
from kvolt.journey.migration import Heard
from kvolt.runtime.http.writer import CHUNK_HEADS, NUM_CHUNK_HEADS, ResponseWriter, chunk_head
from kvolt.runtime.plane.streams import Sink, StepSink

_LINE_END = b"\r\n"

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class TokenFan:
    """Takes the plain tokens of whole steps for all answers of a process."""

    def __init__(
        self, now: Callable[[], float], observe: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._now = now
        self._observe = observe
        """Told how long a step took, from tokens to events."""

    def on_step(self, sinks: Sequence[Sink], token_ids: Sequence[int]) -> None:
        now = self._now()
        observer: Observer | None = None
        last_at, num_alike = 0.0, 0
        for each, token_id in zip(sinks, token_ids, strict=True):
            receiver = cast(LiveReceiver, each)
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
            if receiver.last_at != last_at:  # those of one batch have all had their last token together
                if observer is not None:
                    observer.gap(now - last_at, num_alike)
                observer, last_at, num_alike = receiver.observer, receiver.last_at, 0
            num_alike += 1
            receiver.last_at = now
        if observer is not None:
            observer.gap(now - last_at, num_alike)
        self._observe(self._now() - now)


class LiveReceiver:
    """One prompt's choices on their way to a client."""

    __slots__ = (
        "_answer",
        "after",
        "before",
        "has_begun",
        "last_at",
        "observer",
        "plain_json",
        "size",
        "states",
        "steps",
        "token_ids",
        "write",
    )

    def __init__(self, answer: LiveAnswer, states: list[ChoiceState], steps: StepSink | None) -> None:
        plan = answer.plan
        self._answer = answer
        self.states = states
        self.steps = steps
        self.observer: Observer = plan.observer
        self.has_begun = False
        self.last_at = 0.0
        """When its last token came."""
        self.plain_json = plan.vocabulary.plain_json
        before, after = answer.envelope.plain(plan.wording, states[0].index)
        self.size = len(before) + len(after)
        self.before, self.after = before, after + _LINE_END
        self.write: Callable[[bytes], None] | None = None
        """Set while the next plain token may be written without a look at anything else."""
        self.token_ids = states[0].token_ids
        """Those written that way among them, which the choice has not counted while `write` is set."""

    def on_token(self, token_id: int) -> None:
        """A plain token that is not so plain here."""
        self.on_item(Delta((token_id,)))

    def on_item(self, delta: Delta) -> None:
        if self.write is not None and delta == Delta(delta.token_ids):
            self._on_plain(delta.token_ids)
            return
        try:
            self._on_more(delta)
        except (
            Exception
        ) as fault:  # a parser's or a wording's: it must not cost the other streams of this worker
            self._answer.break_off(fault)

    def _on_plain(self, token_ids: tuple[int, ...]) -> None:
        """Tokens and nothing else, more than one where a slow reader let them merge: still an event each."""
        num_plain = 0
        for token_id in token_ids:
            text = self.plain_json[token_id]
            if not text or self.write is None:
                break
            self.write(b"%b%b%b%b" % (chunk_head(self.size + len(text)), self.before, text, self.after))
            self.token_ids.append(token_id)
            num_plain += 1
        if num_plain:
            self.last_at = self._answer.observe(self.last_at, num_plain, first=False)
        if num_plain < len(token_ids):
            self.settle()
            self.on_item(Delta(token_ids[num_plain:]))

    def _on_more(self, delta: Delta) -> None:
        answer = self._answer
        if not 0 <= delta.index < len(self.states):
            return
        self.last_at = answer.observe(self.last_at, len(delta.token_ids), first=not self.has_begun)
        if not self.has_begun:
            self.has_begun = True
            answer.echo(self, delta)
        answer.note(delta)
        state = self.states[delta.index]
        self.settle()
        state.token_ids.extend(delta.token_ids)
        told = state.choice.feed_delta(delta)
        answer.tell(state, told)
        if told and state.choice.finish is not None and (delta.finish is None or len(self.states) > 1):
            answer.stop_if_over(self)
        self.write = answer.plain_writer(self)

    def on_end(self, error: KvoltError | None) -> None:
        self.settle()
        if self._answer.keeps_text(error):
            error = None
            try:
                self._cut_short()
            except Exception as fault:  # a parser's, as in `on_item`
                self._answer.break_off(fault)
        self._answer.end(self, error)

    def _cut_short(self) -> None:
        answer = self._answer
        for state, last in cut_short(self.states):
            if not self.has_begun:
                self.has_begun = True
                answer.echo(self, last)
            answer.tell(state, state.choice.feed_delta(last))

    def settle(self) -> None:
        """Count what was written past the choice, and let the next token come the long way."""
        if self.write is not None:
            self.states[0].choice.num_tokens = len(self.token_ids)
            self.write = None

    def so_far(self) -> Heard:
        return heard_of(self.states)


class LiveAnswer(Answer):
    """Words the events of one HTTP response. `done` when the last one is written."""

    def __init__(self, plan: Plan, writer: ResponseWriter, steps: StepSink | None) -> None:
        super().__init__(plan)
        wording = plan.wording
        fields = {
            "id": wording.id_prefix + plan.request_id,
            "object": wording.chunk,
            "created": plan.created,
            "model": plan.model,
        }
        self.envelope = Envelope(fields, plan.include_usage)
        self._writer = writer
        self.receivers = [
            LiveReceiver(self, self.choices_of(number), steps) for number in range(len(plan.prompts))
        ]
        self._num_running = len(self.receivers)
        self.failure: KvoltError | None = None
        """What the client was told inside the stream."""
        self._only_text = not (
            plan.with_logprobs or plan.continuous_usage or "completion_token_ids" in plan.extra_fields
        )
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        writer.on_pause = self._hold
        writer.on_resume = self._release

    @property
    def states(self) -> list[ChoiceState]:
        return [state for receiver in self.receivers for state in receiver.states]

    def cancel(self) -> None:
        super().cancel()
        for receiver in self.receivers:
            receiver.settle()

    def close(self) -> None:
        super().close()
        self._writer.on_pause = self._writer.on_resume = _nothing
        self.receivers.clear()

    def open(self) -> None:
        """Send the head and what comes before the first token; from now on errors go into the stream."""
        if self._writer.head_sent or self.done.done():
            return
        for name, value in self.plan.late_headers().items():
            self._writer.add_header(name, value)
        events = [
            b"event: %b\n: %b\n\n" % (name.encode(), encode(value)) for name, value in self.plan.annotations
        ]
        if events:
            self._writer.write(b"".join(events))
        else:
            self._writer.send_head()

    def echo(self, receiver: LiveReceiver, first: Delta) -> None:
        """The prompt as the beginning of its answers, with what the first delta says of it."""
        plan = self.plan
        if not plan.echo:
            return
        number = self.receivers.index(receiver)
        logprobs = None
        if plan.with_logprobs:
            placed = self.placed_prompt(number, first.prompt_logprobs or ())
            logprobs = plan.wording.logprobs(plan.vocabulary, placed, 0)
        self.open()
        for state in receiver.states:
            choice = plan.wording.text_choice(state.index, plan.echo[number], None, logprobs, True)
            self._writer.write(self._event(state, choice))
            state.told_role = True
            state.num_echoed = len(plan.echo[number])

    def tell(self, state: ChoiceState, told: Sequence[Told]) -> None:
        events = self._events(state, told)
        if events:
            self.open()
            for event in events:
                self._writer.write(event)

    def plain_writer(self, receiver: LiveReceiver) -> Callable[[bytes], None] | None:
        """How plain tokens may be written from now on, if they may."""
        writer = self._writer
        state = receiver.states[0]
        if (
            not self._only_text
            or len(receiver.states) > 1
            or not writer.chunked
            or writer.gone
            or not state.told_role
            or not state.choice.is_clean
        ):
            return None
        return writer.write_framed

    def stop_if_over(self, receiver: LiveReceiver) -> None:
        """A stop string ended a choice before its worker knew; with the last one the worker may stop."""
        if all(state.choice.finish is not None for state in receiver.states):
            self._journeys[self.receivers.index(receiver)].cancel()
            self.end(receiver, None)

    def end(self, receiver: LiveReceiver, error: KvoltError | None) -> None:
        self._num_running -= 1
        if self.done.done():
            return
        error = error or unfinished(receiver.states)
        if error is not None:
            self.fail(error)
        elif self._num_running == 0:
            self._say_last()
            self.done.set_result(None)

    def fail(self, error: KvoltError) -> None:
        """Tell it in the stream, or to whoever waits for `done` while there is time for a real status."""
        if self.done.done():
            return
        self.cancel()
        if not self._writer.head_sent:
            self.done.set_exception(error)
            self.done.exception()  # whoever has left already need not hear of it
            return
        self.failure = error
        log.warning("answer %s ended early: %s (%s)", self.plan.request_id, error.message, error.code)
        self._writer.write(error_event(error))  # and no [DONE]: it is not
        self._writer.end()
        self.done.set_result(None)

    # ---

    def _say_last(self) -> None:
        self.open()
        states = self.states
        more: dict[str, Any] = {}
        if self.plan.include_usage:
            more["usage"] = self.usage(states)
        more.update(self.extras(states))
        last = self.envelope.last_event(more) if more else b""
        self._writer.write(last + DONE)
        self._writer.end()

    def _events(self, state: ChoiceState, told: Sequence[Told]) -> list[bytes]:
        """One event per piece; the end of a choice goes with its last text."""
        wording, vocabulary = self.plan.wording, self.plan.vocabulary
        choices: list[dict[str, Any]] = []
        for each in told:
            if each.logprobs:
                state.pending_logprobs.extend(each.logprobs)
            for piece in each.pieces:
                first = not state.told_role
                state.told_role = True
                if isinstance(piece, Content):
                    logprobs = None
                    if state.pending_logprobs:
                        logprobs = wording.logprobs(vocabulary, state.pending_logprobs, state.num_echoed)
                        state.pending_logprobs = []
                    choices.append(wording.text_choice(state.index, piece.text, None, logprobs, first))
                else:
                    choices.append(wording.piece_choice(state.index, piece, first))
        finish = self.finish_told(state.choice)
        if finish is not None and told:
            if not choices or "content" not in choices[-1].get("delta", {"content": ""}):
                choices.append(wording.text_choice(state.index, "", None, None, not state.told_role))
                state.told_role = True
            if state.pending_logprobs and choices[-1]["logprobs"] is None:
                choices[-1]["logprobs"] = wording.logprobs(
                    vocabulary, state.pending_logprobs, state.num_echoed
                )
                state.pending_logprobs = []
            choices[-1]["finish_reason"] = finish
            if state.choice.stop_reason is not None:
                choices[-1]["stop_reason"] = state.choice.stop_reason
        return [self._event(state, choice) for choice in choices]

    def _event(self, state: ChoiceState, choice: dict[str, Any]) -> bytes:
        if not self.plan.continuous_usage:
            return self.envelope.event(choice)
        return self.envelope.event(choice, {"usage": self.usage(self.states)})

    def _hold(self) -> None:
        for journey in self._journeys:
            journey.hold()

    def _release(self) -> None:
        for journey in self._journeys:
            journey.release()
