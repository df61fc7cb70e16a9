"""What both kinds of answer share: what was asked, one state per choice, usage, what is told at the end."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.core.errors import DeadlineExceeded, EngineFailed, KvoltError
from kvolt.frontend.answers.choice import Choice, Placed, placed_prompt
from kvolt.frontend.answers.stops import StopMatcher
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.openai_api.serializer import Wording, prompt_logprobs
from kvolt.frontend.parsers.port import TextParser
from kvolt.journey.journey import Journey
from kvolt.journey.migration import Heard
from kvolt.router.port import Decision

log = logging.getLogger(__name__)

TOKEN = "q"
"""How tokens are kept: eight bytes each, for as long as their answer takes; also what a worker says that is none."""


class Observer(Protocol):
    """Told of the moments that metrics are made of."""

    def first_token(self) -> None: ...

    def gap(self, seconds: float, num_tokens: int) -> None:
        """That long since the token before, for so many tokens."""
        ...


@dataclass(slots=True, kw_only=True)
class Plan:
    """One HTTP request, as far as its answer needs to know it."""

    request_id: str
    created: int
    model: str
    wording: Wording
    vocabulary: Vocabulary
    prompts: Sequence[tuple[int, ...]]
    num_choices: int = 1
    """For each prompt."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    new_parser: Callable[[], TextParser | None] = lambda: None
    named_call: bool = False
    """The caller has named the function to call: ending with it is no choice of the model's."""
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    """Told with each choice, as vLLM does; in a stream there are none."""
    echo: Sequence[str] = ()
    """Texts of the prompts, where they are part of the answer."""
    include_usage: bool = False
    continuous_usage: bool = False
    extra_fields: frozenset[str] = frozenset()
    annotations: Sequence[tuple[str, Any]] = ()
    timing: Callable[[], dict[str, float]] = dict
    """Where the time went so far, in milliseconds."""
    late_headers: Callable[[], Mapping[str, str]] = dict
    """Headers that are only known when the first token is there."""
    observer: Observer
    now: Callable[[], float]


@dataclass(slots=True)
class ChoiceState:
    """A choice and what has been told of it."""

    index: int
    choice: Choice
    told_role: bool = False
    num_echoed: int = 0
    """Characters of the prompt that were told before it."""
    pending_logprobs: list[Placed] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array(TOKEN))
    """All that have come, for who goes on with it when its worker was lost, and for callers who want to see them."""


class Answer(ABC):
    """Base of an answer as a stream and of one in a piece. One receiver per prompt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.cached_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        """Of the first prompt."""
        self.deadline: DeadlineExceeded | None = None
        """The deadline that cut the answer short."""
        self._journeys: list[Journey] = []

    @property
    @abstractmethod
    def states(self) -> list[ChoiceState]:
        """Of all prompts, in the order of their indices."""

    def add_journey(self, journey: Journey) -> None:
        self._journeys.append(journey)

    def cancel(self) -> None:
        """All that still runs for it, up to the engines."""
        for journey in self._journeys:
            journey.cancel()

    def close(self) -> None:
        """Cancel, and let go of all that holds on to the answer in turn: it is freed at once, not some time later."""
        self.cancel()
        self._journeys.clear()

    def break_off(self, fault: Exception) -> None:
        """Something of ours failed on this answer: it ends, and nothing else."""
        log.error("an answer could not be worded", exc_info=fault)
        self.fail(KvoltError("internal error"))

    @abstractmethod
    def fail(self, error: KvoltError) -> None:
        """End it with an error, unless it has ended."""

    def keeps_text(self, error: KvoltError | None) -> bool:
        """Whether an answer that ends with this error is cut short instead: at a deadline, if it has any text."""
        if not isinstance(error, DeadlineExceeded) or not any(state.token_ids for state in self.states):
            return False
        if self.deadline is None:
            self.deadline = error
            num_tokens = sum(len(state.token_ids) for state in self.states)
            log.info(
                "answer %s ended by a deadline: tokens=%d %s", self.plan.request_id, num_tokens, error.message
            )
        return True

    def choices_of(self, prompt: int) -> list[ChoiceState]:
        plan = self.plan
        states = []
        for number in range(plan.num_choices):
            choice = Choice(
                plan.vocabulary.detokenizer(plan.skip_special_tokens),
                StopMatcher(plan.stop, plan.include_stop) if plan.stop else None,
                plan.new_parser(),
                plan.include_stop,
                plan.min_tokens,
            )
            states.append(ChoiceState(prompt * plan.num_choices + number, choice))
        return states

    def placed_prompt(self, prompt: int, logprobs: Sequence[TokenLogprobs | None]) -> list[Placed]:
        """The tokens of a prompt that is part of the answer, with what the worker said of them."""
        plan = self.plan
        detokenizer = plan.vocabulary.detokenizer(plan.skip_special_tokens)
        return placed_prompt(detokenizer, plan.prompts[prompt], logprobs)

    def observe(self, last_at: float, num_tokens: int, first: bool) -> float:
        """Tokens came: tell the metrics, and when that was."""
        now = self.plan.now()
        if first:
            self.plan.observer.first_token()
        elif num_tokens:
            self.plan.observer.gap((now - last_at) / num_tokens, num_tokens)
        return now

    def note(self, delta: Delta) -> None:
        """What a delta says of the request rather than of its text."""
        if delta.prompt_logprobs is not None and not self.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.cached_tokens and not delta.index:  # all choices share the prompt, and each may say so
            self.cached_tokens += delta.cached_tokens
        # Further choices find what the first one has computed: nothing that was there before.
        if delta.usage is not None and not delta.index and not self.cached_tokens:
            self.cached_tokens = delta.usage.cached_tokens

    def finish_told(self, choice: Choice) -> str | None:
        """How a choice ended, in the client's words."""
        cut = isinstance(choice.stop_reason, str)  # by a stop string, perhaps in the middle of its arguments
        if choice.finish is FinishReason.STOP and choice.num_tool_calls and not (self.plan.named_call or cut):
            return FinishReason.TOOL_CALLS.value
        return None if choice.finish is None else choice.finish.value

    def usage(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        prompt_tokens = sum(map(len, self.plan.prompts))
        completion_tokens = sum(state.choice.num_tokens for state in choices)
        reasoning_tokens = sum(state.choice.num_reasoning_tokens for state in choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }

    def extras(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        """The `nvext` object of the last event or of the body: what was asked for, and why an answer was cut short."""
        wanted = self.plan.extra_fields
        told: dict[str, Any] = {}
        if self.deadline is not None:
            told["ended_by"] = {"reason": "deadline", "stage": self.deadline.fields.get("stage")}
        if "worker_id" in wanted:
            told["worker_id"] = self._workers()
        if "timing" in wanted:
            told["timing"] = self.plan.timing() | self._stages()
        if "completion_token_ids" in wanted:
            told["completion_token_ids"] = [token for state in choices for token in state.token_ids]
        if "prompt_logprobs" in wanted and self.prompt_logprobs:
            told["prompt_logprobs"] = prompt_logprobs(self.plan.vocabulary, self.prompt_logprobs)
        if "stop_reason" in wanted:
            told["stop_reason"] = choices[0].choice.stop_reason
        return {"nvext": told} if told else {}

    def _workers(self) -> dict[str, Any]:
        made = [journey for journey in self._journeys if journey.decision is not None]
        if not made or made[0].decision is None:
            return {}
        prefilled = made[0].prefilled
        prefill = {} if prefilled is None else prefill_told(prefilled)
        return prefill | workers_told(made[0].decision)

    def _stages(self) -> dict[str, Any]:
        """By the names of `nvext.timing`, and ours for what it has none for."""
        stages = self._journeys[0].stages if self._journeys else None
        if stages is None:
            return {}
        told = {
            "prefill_wait_time_ms": stages.queue_ms,
            "prefill_time_ms": stages.prefill_ms,
            "kv_transfer_ms": stages.transfer_ms,
            "kv_transfer_bytes": stages.transfer_bytes,
            "kv_transfer_path": stages.transfer_path,
            "kv_onboard_ms": stages.onboard_ms,
            "kv_onboard_blocks": stages.onboard_blocks,
        }
        return {name: value for name, value in told.items() if value is not None}


def cut_short(states: Sequence[ChoiceState]) -> list[tuple[ChoiceState, Delta]]:
    """The choices that still run, each with a delta that ends it as its limit would."""
    return [
        (state, Delta((), index=number, finish=FinishReason.LENGTH))
        for number, state in enumerate(states)
        if state.choice.finish is None
    ]


def heard_of(states: Sequence[ChoiceState]) -> Heard:
    """As a journey asks for it. A stop string may have ended a choice of which its worker knows nothing."""
    return [None if state.choice.finish is not None else state.token_ids for state in states]


def prefill_told(decision: Decision) -> dict[str, Any]:
    """Who computes the prompt where that is another, likewise."""
    told: dict[str, Any] = {"prefill_worker_id": decision.instance.id}
    if decision.dp_rank is not None:
        told["prefill_dp_rank"] = decision.dp_rank
    return told


def workers_told(decision: Decision) -> dict[str, Any]:
    """Who computes an answer, by the names of `nvext.worker_id`."""
    told: dict[str, Any] = {"decode_worker_id": decision.instance.id}
    if decision.dp_rank is not None:
        told["decode_dp_rank"] = decision.dp_rank
    return told


def unfinished(states: Sequence[ChoiceState]) -> KvoltError | None:
    """An answer of which the worker has not said how it ends has not ended well."""
    if all(state.choice.finish not in (None, FinishReason.CANCELLED) for state in states):
        return None
    return EngineFailed("the worker ended an answer without a reason", engine="?")
