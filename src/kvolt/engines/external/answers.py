"""Requests of an engine, and conversion of its output to step outputs.

Ensures the contract's rules: each choice ends once, with usage; nothing follows an abort; plain tokens are sent as
such. Pure. An adapter adds the outputs of a step (`add_output`) and takes them as one StepOutput (`take_step`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvolt.core.delta import Delta, FinishReason, StageTimes, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import InvalidRequest, KvoltError, to_info
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of a request."""

    request: Request
    index: int
    engine_id: str
    """Id in the engine. Unique, so that a reused request id is not confused with the earlier request."""
    num_tokens: int = 0
    """Output tokens sent to the client, including those of a resumed request."""
    has_started: bool = False
    is_finished: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    request: Request
    choices: dict[int, Choice]
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    is_reported: bool = False
    """Whether `cached_tokens` was sent."""
    stages: StageTimes | None = None
    """KV transfers, until the first delta reports them."""


@dataclass(slots=True)
class ChoiceOutput:
    """Output of an engine for one choice in one step."""

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    """Cached tokens of the engine's input, which includes the tokens of a resumed request."""


@dataclass(slots=True)
class Answers:
    """See the module."""

    eos_token_ids: Collection[int] = ()
    _entries: dict[RequestId, Entry] = field(default_factory=dict)
    _choices: dict[str, Choice] = field(default_factory=dict)
    _deltas: list[tuple[RequestId, Delta]] = field(default_factory=list)
    _in_deltas: set[RequestId] = field(default_factory=set)
    """Requests with a delta in this step: their next token must be a delta as well, to keep the order."""
    _failed: list[tuple[RequestId, KvoltError]] = field(default_factory=list)
    _plain: dict[RequestId, int] = field(default_factory=dict)
    """Requests whose only output in this step is one token, the common case."""
    _batch: tuple[RequestId, ...] = ()
    """Request ids of the last step. The same object is reused while they do not change, so that receivers can skip
    work."""
    _number: int = 0
    num_choices: int = 0
    """Unfinished choices of all requests."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    # --- requests

    def open(self, request: Request) -> list[Choice]:
        """Add a request and return its unfinished choices. InvalidRequest if the id is in use."""
        request_id = request.request_id
        if request_id in self._entries:
            raise InvalidRequest(f"request {request_id} exists already", param="request_id")
        self._number += 1
        handoff = request.handoff
        num_reported = 1 if handoff is not None and handoff.first_tokens is not None else 0
        choices = {
            index: Choice(
                request,
                index,
                f"{request_id}/{self._number}/{index}",
                num_tokens=len(request.prior_tokens_of(index)) or num_reported,
            )
            for index in request.open_choices
        }
        self._entries[request_id] = Entry(request, choices)
        self._choices.update((choice.engine_id, choice) for choice in choices.values())
        self.num_choices += len(choices)
        return list(choices.values())

    def find(self, engine_id: str) -> Choice | None:
        """The choice, or None if it has finished or was aborted."""
        return self._choices.get(engine_id)

    def engine_ids_of(self, request_id: RequestId) -> list[str]:
        """Engine ids of a request's choices, including finished ones."""
        entry = self._entries.get(request_id)
        return [] if entry is None else [choice.engine_id for choice in entry.choices.values()]

    def has_started(self, request_id: RequestId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and any(choice.has_started for choice in entry.choices.values())

    def close(self, request_id: RequestId) -> list[str]:
        """Remove a request and its pending output; returns the engine ids of its unfinished choices."""
        self._deltas = [each for each in self._deltas if each[0] != request_id]
        self._failed = [each for each in self._failed if each[0] != request_id]
        self._plain.pop(request_id, None)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return []
        unfinished = [choice.engine_id for choice in entry.choices.values() if not choice.is_finished]
        for engine_id in unfinished:
            self._remove(engine_id)
        return unfinished

    def clear(self) -> None:
        """Close all requests."""
        for request_id in list(self._entries):
            self.close(request_id)

    def _remove(self, engine_id: str) -> None:
        if self._choices.pop(engine_id, None) is not None:
            self.num_choices -= 1

    # --- output

    def add_transfer(self, engine_id: str, num_bytes: int, took_s: float, path: str) -> None:
        """Record a KV transfer for a request, of all ranks or of one. Ranks transfer concurrently."""
        choice = self._choices.get(engine_id)
        if choice is None:
            return
        entry = self._entries[choice.request.request_id]
        before = entry.stages or StageTimes()
        entry.stages = StageTimes(
            transfer_ms=max(before.transfer_ms or 0.0, took_s * 1e3),
            transfer_bytes=(before.transfer_bytes or 0) + num_bytes,
            transfer_path=path,
        )

    def add_output(self, choice: Choice, output: ChoiceOutput) -> None:
        request = choice.request
        entry = self._entries[request.request_id]
        choice.num_tokens += len(output.token_ids)
        choice.has_started = True
        is_lead = choice.index == min(entry.choices)
        if output.cached_tokens is not None and is_lead:
            entry.cached_tokens = min(output.cached_tokens, max(len(request.token_ids) - 1, 0))
        is_first = not entry.is_reported and is_lead
        if (
            not is_first
            and len(output.token_ids) == 1
            and output.finish is None
            and output.logprobs is None
            and request.sampling.num_choices == 1
            and request.request_id not in self._plain
            and request.request_id not in self._in_deltas
        ):
            self._plain[request.request_id] = output.token_ids[0]
            return
        entry.is_reported = entry.is_reported or is_first
        stages, entry.stages = entry.stages, None
        usage = None
        if output.finish is not None:
            usage = Usage(len(request.token_ids), choice.num_tokens, entry.cached_tokens)
            choice.is_finished = True
            self._remove(choice.engine_id)
        stop_reason = output.stop_reason
        if stop_reason in self.eos_token_ids and not request.stop.ignore_eos:
            stop_reason = None  # EOS has no stop reason, even if the client lists it as a stop token
        self._add(
            request.request_id,
            Delta(
                token_ids=output.token_ids,
                index=choice.index,
                finish=output.finish,
                logprobs=output.logprobs,
                prompt_logprobs=output.prompt_logprobs,
                cached_tokens=entry.cached_tokens if is_first else None,
                usage=usage,
                stages=stages,
                stop_reason=stop_reason,
            ),
        )
        if all(each.is_finished for each in entry.choices.values()):
            del self._entries[request.request_id]

    def _add(self, request_id: RequestId, delta: Delta) -> None:
        """Add a delta, after the request's plain token of the same step, which becomes a delta."""
        if request_id in self._plain:
            self._deltas.append((request_id, Delta(token_ids=(self._plain.pop(request_id),))))
        self._deltas.append((request_id, delta))
        self._in_deltas.add(request_id)

    def fail(self, request_id: RequestId, error: KvoltError) -> list[str]:
        """Fail a request; returns the engine ids of its unfinished choices."""
        if request_id not in self._entries:
            return []
        unfinished = self.close(request_id)
        self._failed.append((request_id, error))
        return unfinished

    def take_step(
        self, load: WorkerLoad | None = None, kv_changes: tuple[KvChange, ...] = ()
    ) -> StepOutput | None:
        """Everything added since the last call as one StepOutput; None if there is nothing."""
        plain_ids: tuple[RequestId, ...] = ()
        plain_tokens = tuple(self._plain.values())
        if plain_tokens:
            plain_ids = tuple(self._plain)
            self._plain.clear()
            self._batch = plain_ids = self._batch if plain_ids == self._batch else plain_ids
        deltas, self._deltas = tuple(self._deltas), []
        self._in_deltas.clear()
        failed, self._failed = tuple((each, to_info(error)) for each, error in self._failed), []
        if not (plain_tokens or deltas or failed or load or kv_changes):
            return None
        return StepOutput(deltas, failed, load, plain_ids, plain_tokens, kv_changes)


class Ending(NamedTuple):
    """End of a choice by the contract's rules, for engines that do not apply all of them."""

    num_tokens: int
    """Number of new tokens that belong to the answer."""
    finish: FinishReason | None = None
    """None if the choice continues."""
    stop_reason: int | None = None


def find_end(choice: Choice, tokens: Sequence[int], eos_token_ids: Collection[int]) -> Ending:
    """Apply the rules to new tokens of a choice."""
    stop = choice.request.stop
    for number, token in enumerate(tokens, 1):
        num_output = choice.num_tokens + number
        if num_output > stop.min_tokens and is_end_token(choice.request, token, eos_token_ids):
            return Ending(number, FinishReason.STOP, token if token in stop.stop_token_ids else None)
        if num_output >= stop.max_tokens:
            return Ending(number, FinishReason.LENGTH)
    return Ending(len(tokens))


def is_end_token(request: Request, token: int, eos_token_ids: Collection[int]) -> bool:
    """Whether a token ends an answer that has its minimum length."""
    stop = request.stop
    return token in stop.stop_token_ids or (token in eos_token_ids and not stop.ignore_eos)
