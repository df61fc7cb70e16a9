"""Common base of streaming and whole answers: the request's AnswerSpec, choice states, usage and response extras."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.core.errors import DeadlineExceeded, EngineFailed, KvoltError
from kvolt.frontend.answers.choice import Choice, PromptOnlyChoice, place_prompt_tokens
from kvolt.frontend.answers.stops import StopMatcher
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.metrics.request_record import RequestRecord
from kvolt.frontend.openai_api.serializer import ResponseSerializer, prompt_logprobs
from kvolt.frontend.parsers.port import TextParser
from kvolt.journey.journey import Journey
from kvolt.journey.migration import ChoiceTokens
from kvolt.router.port import Decision
from kvolt.runtime.plane.streams import StepSink

log = logging.getLogger(__name__)

TOKEN = "q"
"""Array type of token ids: 8 bytes, which also holds an invalid id sent by a worker."""


@dataclass(slots=True, kw_only=True)
class AnswerSpec:
    """Parameters of one HTTP request that determine its answer."""

    request_id: str
    created: int
    model: str
    serializer: ResponseSerializer
    vocabulary: Vocabulary
    prompts: Sequence[tuple[int, ...]]
    num_choices: int = 1
    """Choices per prompt."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    new_parser: Callable[[], TextParser | None] = lambda: None
    named_call: bool = False
    """`tool_choice` names a function; the finish reason is then `stop` rather than `tool_calls`."""
    with_logprobs: bool = False
    with_prompt_logprobs: bool = False
    """Return prompt log probabilities with each choice, as vLLM does. Not available in streams."""
    echo: Sequence[str] = ()
    """Prompt texts to prepend to the answers; empty: no echo."""
    prompt_only: bool = False
    """Drop the output, which engines cannot leave out."""
    include_usage: bool = False
    continuous_usage: bool = False
    extra_fields: frozenset[str] = frozenset()
    annotations: Sequence[tuple[str, Any]] = ()
    timing: Callable[[], dict[str, float]] = dict
    """Returns timings so far, in milliseconds."""
    timing_headers: Callable[[], Mapping[str, str]] = dict
    """Returns response headers with timings, known once the first token arrives."""
    observer: RequestRecord
    """Receives token timings for metrics."""
    now: Callable[[], float]

    def envelope_fields(self, kind: str) -> dict[str, Any]:
        """Fields around the choices; `kind`: `whole` or `chunk` of the serializer."""
        request_id = self.serializer.id_prefix + self.request_id
        return {"id": request_id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class ChoiceState:
    """State of one choice of the response."""

    index: int
    choice: Choice
    role_sent: bool = False
    num_echoed: int = 0
    """Characters of the echoed prompt."""
    pending_logprobs: list[PlacedToken] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array(TOKEN))
    """All output tokens, needed for migration and for `completion_token_ids`."""


class PromptReceiver(ABC):
    """Receives the deltas of one prompt. Base of StreamingReceiver and WholeReceiver."""

    __slots__ = ("answer", "has_started", "last_at", "states", "steps")

    def __init__(self, answer: Answer[Any], states: list[ChoiceState], steps: StepSink | None) -> None:
        self.answer = answer
        self.states = states
        self.steps = steps
        self.has_started = False
        self.last_at = 0.0
        """Arrival time of the last token."""

    def on_item(self, delta: Delta) -> None:
        try:
            self.on_delta(delta)
        except Exception as fault:  # of a parser or serializer: must not affect other streams of the worker
            self.answer.fail_internal(fault)

    @abstractmethod
    def on_delta(self, delta: Delta) -> None:
        """Process a delta that is more than a plain token."""

    @abstractmethod
    def truncate(self, state: ChoiceState, last: Delta) -> None:
        """End a choice at a deadline."""

    def on_end(self, error: KvoltError | None) -> None:
        if self.answer.truncate_at_deadline(error):
            error = None
            try:
                for number, state in enumerate(self.states):
                    if state.choice.finish is None:
                        self.truncate(state, Delta((), index=number, finish=FinishReason.LENGTH))
            except Exception as fault:  # as in `on_item`
                self.answer.fail_internal(fault)
        self.answer.end_receiver(self, error)

    def received_tokens(self) -> ChoiceTokens:
        """Output tokens per choice for a migration; None for a finished choice (also by a stop string)."""
        return [None if state.choice.finish is not None else state.token_ids for state in self.states]


R = TypeVar("R", bound=PromptReceiver)


class Answer(ABC, Generic[R]):
    """Base of StreamingAnswer and WholeAnswer. Has one receiver per prompt."""

    def __init__(self, spec: AnswerSpec) -> None:
        self.spec = spec
        self.cached_tokens = 0
        self.prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        """Log probabilities of the first prompt."""
        self.deadline: DeadlineExceeded | None = None
        """Deadline that truncated the answer, if any."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.receivers: list[R] = [
            self.new_receiver(self._new_choice_states(number)) for number in range(len(spec.prompts))
        ]
        self._num_running = len(self.receivers)
        self._journeys: list[Journey] = []

    @abstractmethod
    def new_receiver(self, states: list[ChoiceState]) -> R: ...

    @abstractmethod
    def finish(self) -> None:
        """All choices are complete."""

    @property
    def states(self) -> list[ChoiceState]:
        """Choice states of all prompts, by index."""
        return [state for receiver in self.receivers for state in receiver.states]

    def add_journey(self, journey: Journey) -> None:
        self._journeys.append(journey)

    @property
    def journeys(self) -> tuple[Journey, ...]:
        return tuple(self._journeys)

    def cancel(self) -> None:
        """Cancel all running journeys, and so their engine requests."""
        for journey in self._journeys:
            journey.cancel()

    def close(self) -> None:
        """Cancel and break reference cycles, so that the answer is freed immediately."""
        self.cancel()
        self._journeys.clear()
        self.receivers.clear()

    def stop_receiver(self, receiver: R) -> None:
        """Cancel the journey of a prompt whose choices have all met a stop string."""
        self._journeys[self.receivers.index(receiver)].cancel()
        self.end_receiver(receiver, None)

    def end_receiver(self, receiver: R, error: KvoltError | None) -> None:
        self._num_running -= 1
        if self.done.done():
            return
        error = error or _missing_finish_error(receiver.states)
        if error is not None:
            self.fail(error)
        elif self._num_running == 0:
            self.finish()

    def fail_internal(self, fault: Exception) -> None:
        """End this answer after an internal error, without affecting others."""
        log.error("internal error while building an answer", exc_info=fault)
        self.fail(KvoltError("internal error"))

    def fail(self, error: KvoltError) -> None:
        """End the answer with an error, unless it has ended."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # mark as retrieved: the waiter may be gone

    def truncate_at_deadline(self, error: KvoltError | None) -> bool:
        """Truncate instead of failing if the error is a deadline and the answer has output; return whether it did."""
        if not isinstance(error, DeadlineExceeded) or not any(state.token_ids for state in self.states):
            return False
        if self.deadline is None:
            self.deadline = error
            num_tokens = sum(len(state.token_ids) for state in self.states)
            log.info(
                "answer truncated at deadline: request_id=%s tokens=%d error=%s",
                self.spec.request_id,
                num_tokens,
                error.message,
            )
        return True

    def _new_choice_states(self, prompt: int) -> list[ChoiceState]:
        spec = self.spec
        states = []
        for number in range(spec.num_choices):
            choice = (PromptOnlyChoice if spec.prompt_only else Choice)(
                spec.vocabulary.detokenizer(spec.skip_special_tokens),
                StopMatcher(spec.stop, spec.include_stop) if spec.stop else None,
                spec.new_parser(),
                spec.include_stop,
                spec.min_tokens,
            )
            states.append(ChoiceState(prompt * spec.num_choices + number, choice))
        return states

    def prompt_token_texts(self, prompt: int, logprobs: Sequence[TokenLogprobs | None]) -> list[PlacedToken]:
        """Tokens of an echoed prompt with their log probabilities."""
        spec = self.spec
        detokenizer = spec.vocabulary.detokenizer(spec.skip_special_tokens)
        return place_prompt_tokens(detokenizer, spec.prompts[prompt], logprobs)

    def observe(self, last_at: float, num_tokens: int, first: bool) -> float:
        """Report arrived tokens to the observer; return the current time."""
        now = self.spec.now()
        if first:
            self.spec.observer.on_first_token()
        elif num_tokens:
            self.spec.observer.on_token_gap((now - last_at) / num_tokens, num_tokens)
        return now

    def record_delta(self, delta: Delta) -> None:
        """Record request-level fields of a delta: prompt log probabilities and cached tokens."""
        if delta.prompt_logprobs is not None and not self.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.cached_tokens and not delta.index:  # choices share the prompt: count only the first
            self.cached_tokens += delta.cached_tokens
        # Further choices hit the blocks that the first one computed, which are not cached tokens of the request.
        if delta.usage is not None and not delta.index and not self.cached_tokens:
            self.cached_tokens = delta.usage.cached_tokens

    def finish_reason(self, choice: Choice) -> str | None:
        """OpenAI finish reason of a choice; None while it runs."""
        at_stop_string = isinstance(choice.stop_reason, str)  # possibly amid the arguments of a call
        has_calls = choice.finish is FinishReason.STOP and choice.num_tool_calls
        if has_calls and not (self.spec.named_call or at_stop_string):
            return FinishReason.TOOL_CALLS.value
        return None if choice.finish is None else choice.finish.value

    def usage(self, choices: Sequence[ChoiceState]) -> dict[str, Any]:
        prompt_tokens = sum(map(len, self.spec.prompts))
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
        """The `nvext` object of the body or last event: the requested extra fields, and `ended_by` if truncated."""
        requested_fields = self.spec.extra_fields
        extras: dict[str, Any] = {}
        if self.deadline is not None:
            extras["ended_by"] = {"reason": "deadline", "stage": self.deadline.fields.get("stage")}
        if "worker_id" in requested_fields:
            extras["worker_id"] = self._workers()
        if "timing" in requested_fields:
            timing = self.spec.timing() | self._stages()
            extras["timing"] = {
                name: round(value, 3) if isinstance(value, float) else value for name, value in timing.items()
            }
        if "completion_token_ids" in requested_fields:
            visible = () if self.spec.prompt_only else choices
            extras["completion_token_ids"] = [token for state in visible for token in state.token_ids]
        if "prompt_logprobs" in requested_fields and self.prompt_logprobs:
            extras["prompt_logprobs"] = prompt_logprobs(self.spec.vocabulary, self.prompt_logprobs)
        if "stop_reason" in requested_fields:
            extras["stop_reason"] = choices[0].choice.stop_reason
        return {"nvext": extras} if extras else {}

    def _workers(self) -> dict[str, Any]:
        routed = [journey for journey in self._journeys if journey.decision is not None]
        if not routed or routed[0].decision is None:
            return {}
        prefilled = routed[0].prefill_decision
        prefill = {} if prefilled is None else prefill_worker_fields(prefilled)
        return prefill | decode_worker_fields(routed[0].decision)

    def _stages(self) -> dict[str, Any]:
        """Stage times as fields of `nvext.timing`; `decode_*`, `kv_*` and `retries` are extensions of kvolt."""
        if not self._journeys:
            return {}
        stages, decode_wait_s = self._journeys[0].stages, self._journeys[0].decode_wait_s
        fields = {
            "prefill_wait_time_ms": stages.queue_ms,
            "prefill_time_ms": stages.prefill_ms,
            "decode_wait_time_ms": None if decode_wait_s is None else decode_wait_s * 1e3,
            "kv_transfer_ms": stages.transfer_ms,
            "kv_transfer_bytes": stages.transfer_bytes,
            "kv_transfer_path": stages.transfer_path,
            "kv_onboard_ms": stages.onboard_ms,
            "kv_onboard_blocks": stages.onboard_blocks,
            "retries": sum(journey.num_retries for journey in self._journeys) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def journey_fields(journeys: Sequence[Journey]) -> dict[str, object]:
    """Fields of the request's log line: the workers that got it, in order, its stage times and its retries."""
    instances = {each.id: each.process for journey in journeys for each in journey.instances}
    prefilled = {
        journey.prefill_decision.instance.id: journey.prefill_decision.instance.process
        for journey in journeys
        if journey.prefill_decision is not None
    }
    fields: dict[str, object] = {}
    for prefix, processes in (("prefill_", prefilled), ("", instances)):
        if processes:
            fields[f"{prefix}worker"] = ",".join(processes.values())
            fields[f"{prefix}instance"] = ",".join(processes)
    stages = [journey.stages for journey in journeys]
    for name in ("queue", "prefill", "transfer", "onboard"):
        times = [time for each in stages if (time := getattr(each, f"{name}_ms")) is not None]
        if times:
            fields[f"{name}_s"] = round(max(times) / 1e3, 3)
    waits = [wait_s for journey in journeys if (wait_s := journey.decode_wait_s) is not None]
    if waits:
        fields["decode_queue_s"] = round(max(waits), 3)
    if retries := sum(journey.num_retries for journey in journeys):
        fields["retries"] = retries
    return fields


def prefill_worker_fields(decision: Decision) -> dict[str, Any]:
    """Fields of `nvext.worker_id` for the prefill worker."""
    fields: dict[str, Any] = {"prefill_worker_id": decision.instance.id}
    if decision.dp_rank is not None:
        fields["prefill_dp_rank"] = decision.dp_rank
    return fields


def decode_worker_fields(decision: Decision) -> dict[str, Any]:
    """Fields of `nvext.worker_id` for the decode worker."""
    fields: dict[str, Any] = {"decode_worker_id": decision.instance.id}
    if decision.dp_rank is not None:
        fields["decode_dp_rank"] = decision.dp_rank
    return fields


def _missing_finish_error(states: Sequence[ChoiceState]) -> KvoltError | None:
    """Error if a choice ended without a finish reason from its worker."""
    if all(state.choice.finish not in (None, FinishReason.CANCELLED) for state in states):
        return None
    return EngineFailed("the worker ended the stream without a finish reason", engine="?")
