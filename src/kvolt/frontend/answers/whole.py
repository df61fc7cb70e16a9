"""Whole (non-streaming) answer: collects tokens and decodes them at the end, if nothing needs their text earlier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.core.errors import KvoltError
from kvolt.frontend.answers.answer import (
    Answer,
    AnswerSpec,
    ChoiceState,
    missing_finish_error,
    tokens_by_choice,
    truncation_deltas,
)
from kvolt.frontend.answers.choice import ChoiceOutput, PlacedToken
from kvolt.frontend.openai_api.serializer import (
    CallIds,
    Envelope,
    ToolCall,
    WholeChoice,
    prompt_logprobs,
)
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart
from kvolt.journey.migration import ChoiceTokens
from kvolt.runtime.plane.streams import StepSink


class WholeReceiver:
    """Receives the deltas of one prompt; only collects tokens if there are no stop strings, parsers or logprobs."""

    __slots__ = (
        "_answer",
        "_only_collects",
        "has_started",
        "last_at",
        "outputs",
        "prompt_logprobs",
        "states",
        "steps",
        "write",
    )

    def __init__(self, answer: WholeAnswer, states: list[ChoiceState], steps: StepSink | None) -> None:
        spec = answer.spec
        self._answer = answer
        self.states = states
        self.steps = steps
        self.write = None
        """No fast path: nothing is written before the end."""
        self.last_at = 0.0
        self.has_started = False
        self.outputs: list[list[ChoiceOutput]] = [[] for _ in states]
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._only_collects = not spec.with_logprobs and all(state.choice.is_plain for state in states)

    def on_token(self, token_id: int) -> None:
        """Process a plain token of the first choice."""
        if self._only_collects:
            self._observe(1)
            self.states[0].token_ids.append(token_id)
        else:
            self.on_item(Delta((token_id,)))

    def on_item(self, delta: Delta) -> None:
        try:
            self._process(delta)
        except Exception as fault:  # of a parser: must not affect other streams of the worker
            self._answer.fail_internal(fault)

    def _process(self, delta: Delta) -> None:
        self._observe(len(delta.token_ids))
        self._answer.record_delta(delta)
        if not 0 <= delta.index < len(self.states):
            return
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        state = self.states[delta.index]
        state.token_ids.extend(delta.token_ids)
        new = self._feed(state, delta)
        if (
            self._only_collects
            or not new
            or state.choice.finish is None
            or (delta.finish is not None and len(self.states) == 1)
        ):
            return  # still running, already finished, or finished by the worker
        if all(each.choice.finish is not None for each in self.states):
            self._answer.stop(self)

    def _feed(self, state: ChoiceState, delta: Delta) -> list[ChoiceOutput]:
        if not self._only_collects:
            new = state.choice.feed_delta(delta)
        else:
            new = [] if delta.finish is None else [self._decode(state, delta)]
        self.outputs[delta.index] += new
        return new

    def on_end(self, error: KvoltError | None) -> None:
        if self._answer.truncate_at_deadline(error):
            error = None
            try:
                for state, last in truncation_deltas(self.states):
                    self._feed(state, last)
            except Exception as fault:  # of a parser, as in `on_item`
                self._answer.fail_internal(fault)
        self._answer.end_receiver(self, error)

    def received_tokens(self) -> ChoiceTokens:
        return tokens_by_choice(self.states)

    def _decode(self, state: ChoiceState, delta: Delta) -> ChoiceOutput:
        spec, visible_ids = self._answer.spec, state.token_ids.tolist()
        if state.choice.hides_last(delta):
            del visible_ids[-1:]
        text = spec.vocabulary.decode(visible_ids, spec.skip_special_tokens)
        return state.choice.feed_whole(text, len(state.token_ids), delta)

    def _observe(self, num_tokens: int) -> None:
        self.last_at = self._answer.observe(self.last_at, num_tokens, first=not self.has_started)
        self.has_started = True


class WholeAnswer(Answer):
    """Collects the output of all receivers; call `body` when `done` is set."""

    def __init__(self, spec: AnswerSpec, new_call_id: CallIds, steps: StepSink | None = None) -> None:
        super().__init__(spec)
        self._new_call_id = new_call_id
        self.receivers = [
            WholeReceiver(self, self.new_choice_states(number), steps) for number in range(len(spec.prompts))
        ]
        self._num_running = len(self.receivers)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def states(self) -> list[ChoiceState]:
        return [state for receiver in self.receivers for state in receiver.states]

    def close(self) -> None:
        super().close()
        self.receivers.clear()

    def stop(self, receiver: WholeReceiver) -> None:
        """Cancel the journey of a prompt whose choices have all met a stop string."""
        self._journeys[self.receivers.index(receiver)].cancel()
        self.end_receiver(receiver, None)

    def end_receiver(self, receiver: WholeReceiver, error: KvoltError | None) -> None:
        self._num_running -= 1
        error = error or missing_finish_error(receiver.states)
        if error is not None:
            self.fail(error)
        elif self._num_running == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: KvoltError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark as retrieved: the waiter may be gone

    def body(self) -> bytes:
        spec = self.spec
        serializer = spec.serializer
        fields = {
            "id": serializer.id_prefix + spec.request_id,
            "object": serializer.whole,
            "created": spec.created,
            "model": spec.model,
        }
        choices = [
            serializer.whole_choice(self._whole(echo, receiver, state, outputs))
            for receiver, echo in zip(self.receivers, spec.echo or [""] * len(self.receivers), strict=True)
            for state, outputs in zip(receiver.states, receiver.outputs, strict=True)
        ]
        return Envelope(fields, False).body(choices, self.usage(self.states), self.extras(self.states))

    def _whole(
        self, echo: str, receiver: WholeReceiver, state: ChoiceState, outputs: list[ChoiceOutput]
    ) -> WholeChoice:
        spec = self.spec
        whole = WholeChoice(index=state.index, finish=self.finish_reason(state.choice), calls=[], extra={})
        texts: list[str] = []
        reasoning: list[str] = []
        logprobs: list[PlacedToken] = []
        for output in outputs:
            logprobs.extend(output.logprobs)
            for piece in output.pieces:
                self._add(whole, piece, texts, reasoning)
        whole.text = echo + "".join(texts)
        whole.reasoning = "".join(reasoning) if reasoning else None
        if spec.with_logprobs:
            prompt_tokens = (
                self.prompt_token_texts(self.receivers.index(receiver), receiver.prompt_logprobs)
                if echo
                else []
            )
            choice_tokens = [each._replace(start=each.start + len(echo)) for each in logprobs]
            whole.logprobs = spec.serializer.logprobs(spec.vocabulary, [*prompt_tokens, *choice_tokens], 0)
        if isinstance(state.choice.stop_reason, int | str) and state.choice.finish is FinishReason.STOP:
            whole.extra["stop_reason"] = state.choice.stop_reason
        if spec.with_prompt_logprobs:
            whole.extra["prompt_logprobs"] = prompt_logprobs(spec.vocabulary, receiver.prompt_logprobs)
        return whole

    def _add(self, whole: WholeChoice, piece: Piece, texts: list[str], reasoning: list[str]) -> None:
        match piece:
            case Content(text):
                texts.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolStart(_, name):
                whole.calls.append(ToolCall(self._new_call_id(), name))
            case ToolArguments(number, text):
                whole.calls[number].arguments += text
