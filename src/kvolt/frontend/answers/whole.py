"""Whole (non-streaming) answer: collects tokens and decodes them at the end, if nothing needs their text earlier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.frontend.answers.answer import Answer, AnswerSpec, ChoiceState, PromptReceiver
from kvolt.frontend.answers.choice import ChoiceOutput
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.openai_api.serializer import Envelope, ToolCall, WholeChoice, prompt_logprobs
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart
from kvolt.runtime.plane.streams import StepSink


class WholeReceiver(PromptReceiver):
    """Only collects tokens if there are no stop strings, parsers or logprobs."""

    __slots__ = ("_only_collects", "outputs", "prompt_logprobs", "write")

    answer: WholeAnswer

    def __init__(self, answer: WholeAnswer, states: list[ChoiceState], steps: StepSink | None) -> None:
        super().__init__(answer, states, steps)
        self.write = None
        """No fast path: nothing is written before the end."""
        self.outputs: list[list[ChoiceOutput]] = [[] for _ in states]
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._only_collects = not answer.spec.with_logprobs and all(state.choice.is_plain for state in states)

    def on_token(self, token_id: int) -> None:
        """Process a plain token of the first choice."""
        if self._only_collects:
            self._observe(1)
            self.states[0].token_ids.append(token_id)
        else:
            self.on_item(Delta((token_id,)))

    def on_delta(self, delta: Delta) -> None:
        self._observe(len(delta.token_ids))
        self.answer.record_delta(delta)
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
            self.answer.stop_receiver(self)

    def _feed(self, state: ChoiceState, delta: Delta) -> list[ChoiceOutput]:
        if not self._only_collects:
            new = state.choice.feed_delta(delta)
        else:
            new = [] if delta.finish is None else [self._decode(state, delta)]
        self.outputs[delta.index] += new
        return new

    def truncate(self, state: ChoiceState, last: Delta) -> None:
        self._feed(state, last)

    def _decode(self, state: ChoiceState, delta: Delta) -> ChoiceOutput:
        spec, visible_ids = self.answer.spec, state.token_ids.tolist()
        if state.choice.hides_last(delta):
            del visible_ids[-1:]
        text = spec.vocabulary.decode(visible_ids, spec.skip_special_tokens)
        return state.choice.feed_whole(text, len(state.token_ids), delta)

    def _observe(self, num_tokens: int) -> None:
        self.last_at = self.answer.observe(self.last_at, num_tokens, first=not self.has_started)
        self.has_started = True


class WholeAnswer(Answer[WholeReceiver]):
    """Collects the output of all receivers; call `body` when `done` is set."""

    def __init__(
        self, spec: AnswerSpec, new_call_id: Callable[[], str], steps: StepSink | None = None
    ) -> None:
        self._new_call_id = new_call_id
        self._steps = steps
        super().__init__(spec)

    def new_receiver(self, states: list[ChoiceState]) -> WholeReceiver:
        return WholeReceiver(self, states, self._steps)

    def finish(self) -> None:
        self.done.set_result(None)

    def body(self) -> bytes:
        spec = self.spec
        serializer = spec.serializer
        choices = [
            serializer.whole_choice(self._whole(echo, receiver, state, outputs))
            for receiver, echo in zip(self.receivers, spec.echo or [""] * len(self.receivers), strict=True)
            for state, outputs in zip(receiver.states, receiver.outputs, strict=True)
        ]
        envelope = Envelope(spec.envelope_fields(serializer.whole), False)
        return envelope.body(choices, self.usage(self.states), self.extras(self.states))

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
