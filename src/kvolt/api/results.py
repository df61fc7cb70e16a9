"""Results of the Python API, and the answer that collects them. Text, stop strings and parsers are the frontend's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvolt.core.delta import Delta, TokenLogprobs
from kvolt.frontend.answers.answer import Answer, AnswerSpec, ChoiceState, PromptReceiver
from kvolt.frontend.answers.choice import ChoiceOutput
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.openai_api.serializer import ToolCall
from kvolt.frontend.parsers.port import Content, Reasoning, ToolArguments, ToolStart


class Logprob(NamedTuple):
    """Log probability of a token at one position."""

    logprob: float
    decoded_token: str


Logprobs = dict[int, Logprob]
"""By token id: the token at a position first, then its alternatives, most likely first."""


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output of a prompt; in a stream, what is new of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    """Includes the token that ended the output, which is not in the text."""
    finish_reason: str | None = None
    """`stop`, `length` or `tool_calls`; None while it runs."""
    stop_reason: int | str | None = None
    """Stop string or stop token that ended it."""
    logprobs: tuple[Logprobs, ...] | None = None
    """One entry per token of the text."""
    reasoning: str | None = None
    """Reasoning of a chat, if the model's parser separates it."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of a chat; in a stream they come with the finish reason."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one prompt; in a stream, what is new since the previous one."""

    request_id: str
    prompt: str | None
    """Text of the prompt, rendered by the chat template for a chat; None for token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """By index; in a stream only those with something new."""
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """One entry per prompt token, None for the first."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, because their KV was cached."""
    finished: bool = False


@dataclass(slots=True)
class _Untaken:
    """Output of a choice that has not been taken yet."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[PlacedToken] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    num_tokens_taken: int = 0
    is_finish_taken: bool = False


class ResultReceiver(PromptReceiver):
    """Receives the deltas of the prompt."""

    answer: ResultAnswer

    def on_delta(self, delta: Delta) -> None:
        answer = self.answer
        if not 0 <= delta.index < len(self.states):
            return
        self.last_at = answer.observe(self.last_at, len(delta.token_ids), first=not self.has_started)
        self.has_started = True
        answer.record_delta(delta)
        state = self.states[delta.index]
        state.token_ids.extend(delta.token_ids)
        outputs = state.choice.feed_delta(delta)
        answer.collect(state, outputs)
        is_stopped_here = state.choice.finish is not None and (delta.finish is None or len(self.states) > 1)
        if outputs and is_stopped_here and all(each.choice.finish is not None for each in self.states):
            answer.stop_receiver(self)

    def truncate(self, state: ChoiceState, last: Delta) -> None:
        self.answer.collect(state, state.choice.feed_delta(last))


class ResultAnswer(Answer[ResultReceiver]):
    """Answer to one prompt, taken in parts or as a whole."""

    def __init__(self, spec: AnswerSpec, prompt: str | None, new_call_id: Callable[[], str]) -> None:
        self._prompt = prompt
        self._new_call_id = new_call_id
        self._untaken = [_Untaken() for _ in range(spec.num_choices)]
        self._has_news = asyncio.Event()
        super().__init__(spec)

    def new_receiver(self, states: list[ChoiceState]) -> ResultReceiver:
        return ResultReceiver(self, states, None)

    def collect(self, state: ChoiceState, outputs: Sequence[ChoiceOutput]) -> None:
        untaken = self._untaken[state.index]
        for output in outputs:
            untaken.logprobs.extend(output.logprobs)
            for piece in output.pieces:
                match piece:
                    case Content(text):
                        untaken.texts.append(text)
                    case Reasoning(text):
                        untaken.reasoning.append(text)
                    case ToolStart(_, name):
                        untaken.calls.append(ToolCall(self._new_call_id(), name))
                    case ToolArguments(number, text):
                        untaken.calls[number].arguments += text
        self.wake()

    def finish(self) -> None:
        self.done.set_result(None)

    def wake(self) -> None:
        """End the `wait_news` of the reader."""
        self._has_news.set()

    async def wait_news(self) -> None:
        """Wait until there may be something to take, or for `wake`."""
        await self._has_news.wait()
        self._has_news.clear()

    def take(self) -> RequestOutput:
        """Everything that has arrived and was not taken."""
        spec = self.spec
        outputs = [output for state in self.states if (output := self._take(state)) is not None]
        logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=spec.request_id,
            prompt=self._prompt,
            prompt_token_ids=spec.prompts[0],
            outputs=tuple(outputs),
            prompt_logprobs=tuple(
                None if each is None else _logprobs(spec.vocabulary, each) for each in logprobs
            )
            if logprobs
            else None,
            num_cached_tokens=self.cached_tokens,
            finished=all(state.choice.finish is not None for state in self.states),
        )

    def _take(self, state: ChoiceState) -> CompletionOutput | None:
        """New output of a choice; None if there is none."""
        spec, choice, untaken = self.spec, state.choice, self._untaken[state.index]
        token_ids = tuple(state.token_ids[untaken.num_tokens_taken : choice.num_tokens])
        is_finished = choice.finish is not None
        has_text = untaken.texts or untaken.reasoning
        if not token_ids and not has_text and (untaken.is_finish_taken or not is_finished):
            return None
        calls = untaken.calls if is_finished else []
        self._untaken[state.index] = _Untaken(
            calls=[] if is_finished else untaken.calls,
            num_tokens_taken=untaken.num_tokens_taken + len(token_ids),
            is_finish_taken=is_finished,
        )
        return CompletionOutput(
            index=state.index,
            text="".join(untaken.texts),
            token_ids=token_ids,
            finish_reason=self.finish_reason(choice),
            stop_reason=choice.stop_reason,
            logprobs=tuple(
                _logprobs(spec.vocabulary, placed.logprobs) for placed in untaken.logprobs if placed.logprobs
            )
            if spec.with_logprobs
            else None,
            reasoning="".join(untaken.reasoning) if untaken.reasoning else None,
            tool_calls=tuple(calls),
        )


def _logprobs(vocabulary: Vocabulary, token: TokenLogprobs) -> Logprobs:
    likely = {token.token_id: token.logprob, **dict(token.top)}
    return {
        token_id: Logprob(logprob, vocabulary.token_text(token_id)) for token_id, logprob in likely.items()
    }
