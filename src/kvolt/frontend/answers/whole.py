"""An answer in one piece: tokens are kept until the end and turned into text in one go, where that is possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.core.errors import KvoltError
from kvolt.frontend.answers.answer import Answer, ChoiceState, Plan, cut_short, heard_of, unfinished
from kvolt.frontend.answers.choice import Placed, Told
from kvolt.frontend.openai_api.serializer import (
    CallIds,
    Envelope,
    ToolCall,
    WholeChoice,
    prompt_logprobs,
)
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart
from kvolt.journey.migration import Heard
from kvolt.runtime.plane.streams import StepSink


class WholeReceiver:
    """One prompt's. Tokens of a choice without stop strings and log probabilities are only collected."""

    __slots__ = (
        "_answer",
        "_only_collects",
        "has_begun",
        "last_at",
        "prompt_logprobs",
        "states",
        "steps",
        "told",
        "write",
    )

    def __init__(self, answer: WholeAnswer, states: list[ChoiceState], steps: StepSink | None) -> None:
        plan = answer.plan
        self._answer = answer
        self.states = states
        self.steps = steps
        self.write = None
        """Never written to while it runs."""
        self.last_at = 0.0
        self.has_begun = False
        self.told: list[list[Told]] = [[] for _ in states]
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._only_collects = not plan.with_logprobs and all(state.choice.is_plain for state in states)

    def on_token(self, token_id: int) -> None:
        """A plain token of the first choice."""
        if self._only_collects:
            self._begin(1)
            self.states[0].token_ids.append(token_id)
        else:
            self.on_item(Delta((token_id,)))

    def on_item(self, delta: Delta) -> None:
        try:
            self._take(delta)
        except Exception as fault:  # a parser's: it must not cost the other streams of this worker
            self._answer.break_off(fault)

    def _take(self, delta: Delta) -> None:
        self._begin(len(delta.token_ids))
        self._answer.note(delta)
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
            return  # not over, over already, or the worker knows
        if all(each.choice.finish is not None for each in self.states):
            self._answer.stop(self)

    def _feed(self, state: ChoiceState, delta: Delta) -> list[Told]:
        if not self._only_collects:
            new = state.choice.feed_delta(delta)
        else:
            new = [] if delta.finish is None else [self._decode(state, delta)]
        self.told[delta.index] += new
        return new

    def on_end(self, error: KvoltError | None) -> None:
        if self._answer.keeps_text(error):
            error = None
            try:
                for state, last in cut_short(self.states):
                    self._feed(state, last)
            except Exception as fault:  # a parser's, as in `on_item`
                self._answer.break_off(fault)
        self._answer.end(self, error)

    def so_far(self) -> Heard:
        return heard_of(self.states)

    def _decode(self, state: ChoiceState, delta: Delta) -> Told:
        plan, shown = self._answer.plan, state.token_ids.tolist()
        if state.choice.hides_last(delta):
            del shown[-1:]
        text = plan.vocabulary.decode(shown, plan.skip_special_tokens)
        return state.choice.feed_whole(text, len(state.token_ids), delta)

    def _begin(self, num_tokens: int) -> None:
        self.last_at = self._answer.observe(self.last_at, num_tokens, first=not self.has_begun)
        self.has_begun = True


class WholeAnswer(Answer):
    """Collects all receivers; `body` when the future is done."""

    def __init__(self, plan: Plan, new_call_id: CallIds, steps: StepSink | None = None) -> None:
        super().__init__(plan)
        self._new_call_id = new_call_id
        self.receivers = [
            WholeReceiver(self, self.choices_of(number), steps) for number in range(len(plan.prompts))
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
        """Every choice of a prompt has met a stop string before its worker knew."""
        self._journeys[self.receivers.index(receiver)].cancel()
        self.end(receiver, None)

    def end(self, receiver: WholeReceiver, error: KvoltError | None) -> None:
        self._num_running -= 1
        error = error or unfinished(receiver.states)
        if error is not None:
            self.fail(error)
        elif self._num_running == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: KvoltError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever has left already need not hear of it

    def body(self) -> bytes:
        plan = self.plan
        wording = plan.wording
        fields = {
            "id": wording.id_prefix + plan.request_id,
            "object": wording.whole,
            "created": plan.created,
            "model": plan.model,
        }
        choices = [
            wording.whole_choice(self._whole(echo, receiver, state, told))
            for receiver, echo in zip(self.receivers, plan.echo or [""] * len(self.receivers), strict=True)
            for state, told in zip(receiver.states, receiver.told, strict=True)
        ]
        return Envelope(fields, False).body(choices, self.usage(self.states), self.extras(self.states))

    def _whole(self, echo: str, receiver: WholeReceiver, state: ChoiceState, told: list[Told]) -> WholeChoice:
        plan = self.plan
        whole = WholeChoice(index=state.index, finish=self.finish_told(state.choice), calls=[], extra={})
        texts: list[str] = []
        reasoning: list[str] = []
        logprobs: list[Placed] = []
        for each in told:
            logprobs.extend(each.logprobs)
            for piece in each.pieces:
                self._add(whole, piece, texts, reasoning)
        whole.text = echo + "".join(texts)
        whole.reasoning = "".join(reasoning) if reasoning else None
        if plan.with_logprobs:
            of_prompt = (
                self.placed_prompt(self.receivers.index(receiver), receiver.prompt_logprobs) if echo else []
            )
            after = [each._replace(start=each.start + len(echo)) for each in logprobs]
            whole.logprobs = plan.wording.logprobs(plan.vocabulary, [*of_prompt, *after], 0)
        if isinstance(state.choice.stop_reason, int | str) and state.choice.finish is FinishReason.STOP:
            whole.extra["stop_reason"] = state.choice.stop_reason
        if plan.with_prompt_logprobs:
            whole.extra["prompt_logprobs"] = prompt_logprobs(plan.vocabulary, receiver.prompt_logprobs)
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
