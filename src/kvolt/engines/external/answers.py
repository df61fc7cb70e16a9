"""Answers: the requests that an engine of others has, and what it says of them as our steps.

Owns what is due to each of them: that choices end once, with their usage; that nothing comes after an abort; which
tokens are plain. Pure: knows no engine and no loop. An adapter tells what came and takes a step when it has told all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvolt.core.delta import Delta, FinishReason, StageTimes, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import InvalidRequest, KvoltError, to_info
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's answers."""

    request: Request
    index: int
    engine_id: str
    """Its name in the engine: of its own, so that an id that is used again is not taken for the one before."""
    num_tokens: int = 0
    """That the client has, those it brought among them."""
    has_begun: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    request: Request
    choices: dict[int, Choice]
    cached: int = 0
    """Of the prompt, tokens that were not computed."""
    is_told: bool = False
    """Of `cached`."""
    stages: StageTimes | None = None
    """KV transfers, until the first delta reports them."""


@dataclass(slots=True)
class News:
    """What an engine says of one choice in one step."""

    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    """Of all that the engine was given: what the client brought is not counted as the prompt's."""


@dataclass(slots=True)
class Answers:
    """See the module."""

    eos_token_ids: Collection[int] = ()
    _entries: dict[RequestId, Entry] = field(default_factory=dict)
    _choices: dict[str, Choice] = field(default_factory=dict)
    _deltas: list[tuple[RequestId, Delta]] = field(default_factory=list)
    _in_deltas: set[RequestId] = field(default_factory=set)
    """Of this step: what follows of them is no plain token, which would be told before."""
    _failed: list[tuple[RequestId, KvoltError]] = field(default_factory=list)
    _plain: dict[RequestId, int] = field(default_factory=dict)
    """Tokens that are all there is to tell of their requests, as most are in most steps."""
    _batch: tuple[RequestId, ...] = ()
    """Of the last step: while it stays the same it is the same object, and who reads it need not look again."""
    _number: int = 0
    num_choices: int = 0
    """Open ones, of all requests."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    # --- requests

    def open(self, request: Request) -> list[Choice]:
        """The choices that are to be computed, each under the name that the engine is to know it by. InvalidRequest
        for an id that is here already."""
        request_id = request.request_id
        if request_id in self._entries:
            raise InvalidRequest(f"request {request_id} is here already", param="request_id")
        self._number += 1
        handoff = request.handoff
        num_told = 1 if handoff is not None and handoff.first_tokens is not None else 0
        choices = {
            index: Choice(
                request,
                index,
                f"{request_id}/{self._number}/{index}",
                num_tokens=len(request.resumed(index)) or num_told,
            )
            for index in request.open_choices
        }
        self._entries[request_id] = Entry(request, choices)
        self._choices.update((choice.engine_id, choice) for choice in choices.values())
        self.num_choices += len(choices)
        return list(choices.values())

    def find(self, engine_id: str) -> Choice | None:
        """None for one that is over, or nobody waits for."""
        return self._choices.get(engine_id)

    def names_of(self, request_id: RequestId) -> list[str]:
        """Of its choices, in the engine; those that are over among them."""
        entry = self._entries.get(request_id)
        return [] if entry is None else [choice.engine_id for choice in entry.choices.values()]

    def has_begun(self, request_id: RequestId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and any(choice.has_begun for choice in entry.choices.values())

    def close(self, request_id: RequestId) -> list[str]:
        """Nothing is told of it any more. The names of those of its choices that the engine still has."""
        self._deltas = [each for each in self._deltas if each[0] != request_id]
        self._failed = [each for each in self._failed if each[0] != request_id]
        self._plain.pop(request_id, None)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return []
        left = [choice.engine_id for choice in entry.choices.values() if not choice.is_over]
        for engine_id in left:
            self._forget(engine_id)
        return left

    def clear(self) -> None:
        """All of them are closed."""
        for request_id in list(self._entries):
            self.close(request_id)

    def _forget(self, engine_id: str) -> None:
        if self._choices.pop(engine_id, None) is not None:
            self.num_choices -= 1

    # --- what the engine says

    def add_transfer(self, engine_id: str, num_bytes: int, took_s: float, path: str) -> None:
        """KV of a request was transferred here, all of it or the part of one rank. Ranks transfer side by side."""
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

    def tell(self, choice: Choice, news: News) -> None:
        request = choice.request
        entry = self._entries[request.request_id]
        choice.num_tokens += len(news.token_ids)
        choice.has_begun = True
        is_lead = choice.index == min(entry.choices)
        if news.cached_tokens is not None and is_lead:
            entry.cached = min(news.cached_tokens, max(len(request.token_ids) - 1, 0))
        is_first = not entry.is_told and is_lead
        if (
            not is_first
            and len(news.token_ids) == 1
            and news.finish is None
            and news.logprobs is None
            and request.sampling.num_choices == 1
            and request.request_id not in self._plain
            and request.request_id not in self._in_deltas
        ):
            self._plain[request.request_id] = news.token_ids[0]
            return
        entry.is_told = entry.is_told or is_first
        stages, entry.stages = entry.stages, None
        usage = None
        if news.finish is not None:
            usage = Usage(len(request.token_ids), choice.num_tokens, entry.cached)
            choice.is_over = True
            self._forget(choice.engine_id)
        stop_reason = news.stop_reason
        if stop_reason in self.eos_token_ids and not request.stop.ignore_eos:
            stop_reason = None  # it ended by itself, whoever named that token besides
        self._add(
            request.request_id,
            Delta(
                token_ids=news.token_ids,
                index=choice.index,
                finish=news.finish,
                logprobs=news.logprobs,
                prompt_logprobs=news.prompt_logprobs,
                cached_tokens=entry.cached if is_first else None,
                usage=usage,
                stages=stages,
                stop_reason=stop_reason,
            ),
        )
        if all(each.is_over for each in entry.choices.values()):
            del self._entries[request.request_id]

    def _add(self, request_id: RequestId, delta: Delta) -> None:
        """A plain token that waits in the same step goes first, as a delta: it was not plain after all."""
        if request_id in self._plain:
            self._deltas.append((request_id, Delta(token_ids=(self._plain.pop(request_id),))))
        self._deltas.append((request_id, delta))
        self._in_deltas.add(request_id)

    def fail(self, request_id: RequestId, error: KvoltError) -> list[str]:
        """The engine gives up on it, with all its choices; those that it still has."""
        if request_id not in self._entries:
            return []
        left = self.close(request_id)
        self._failed.append((request_id, error))
        return left

    def take(
        self, load: WorkerLoad | None = None, kv_changes: tuple[KvChange, ...] = ()
    ) -> StepOutput | None:
        """All that was told since the last time, as one step; None where that is nothing."""
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
