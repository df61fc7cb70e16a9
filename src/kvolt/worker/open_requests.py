"""Requests that a worker has, each with the stream for its answer, and the watchdog for an engine without steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvolt.core.delta import Delta, StageTimes, StepOutput
from kvolt.core.errors import from_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.runtime.clock import Clock
from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.steps import StepSender
from kvolt.worker.metrics import FAILED, FINISHED, WorkerMetrics

_FIRST_STEP_FACTOR = 10
"""The first step may load kernels, capture graphs and warm caches."""


@dataclass(slots=True)
class OpenRequest:
    stream: IncomingStream
    num_choices_left: int
    num_prompt_tokens: int
    opened_at: float
    deadline: asyncio.TimerHandle | None = None
    stages: StageTimes | None = None
    """Transfer or onboarding times, until the first delta has carried them."""
    preparation: asyncio.Task[None] | None = None
    """Handoff or onboarding, before the engine gets the request or instead."""
    transferred_blocks: int = 0
    """Prompt blocks that came from a prefill worker; they are not counted as cached."""
    is_submitted: bool = False

    def add_stages(self, stages: StageTimes | None) -> None:
        if stages is not None:
            self.stages = stages if self.stages is None else self.stages.updated(stages)


class OpenRequests:
    """See the module."""

    def __init__(self, now: Callable[[], float], metrics: WorkerMetrics, progress: RequestProgress) -> None:
        self._now = now
        self.metrics = metrics
        self._progress = progress
        self._entries: dict[RequestId, OpenRequest] = {}
        self.num_submitted = 0
        """Requests that the engine has."""
        self.block_size = 0
        self.on_stages: Callable[[StageTimes], None] = lambda stages: None
        """Called with the transfer times that an engine reports."""
        self._plain_ids: tuple[RequestId, ...] = ()
        self._plain = StepSender(())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate over a copy, so that requests may be closed during the iteration."""
        return iter(list(self._entries))

    def get(self, request_id: RequestId) -> OpenRequest | None:
        return self._entries.get(request_id)

    def add(
        self,
        request: Request,
        stream: IncomingStream,
        on_deadline: Callable[[RequestId, float], None],
        is_submitted: bool = True,
    ) -> OpenRequest:
        """Add a request and start its deadline timer, if it has a deadline."""
        entry = self._entries[request.request_id] = OpenRequest(
            stream, len(request.open_choices), request.num_prompt_tokens, self._now()
        )
        if is_submitted:
            self.mark_submitted(entry)
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(
                request.deadline_s, on_deadline, request.request_id, request.deadline_s
            )
        return entry

    def mark_submitted(self, entry: OpenRequest) -> None:
        entry.is_submitted = True
        self.num_submitted += 1
        if self.num_submitted == 1:
            self._progress.on_work()

    def on_first_token(self, entry: OpenRequest, cached_tokens: int) -> None:
        self.metrics.on_prompt(entry.num_prompt_tokens, cached_tokens, self._now() - entry.opened_at)

    def deliver(self, step: StepOutput) -> int:
        """Send the output of a step to the streams, and end those that it ends. Returns the number of tokens."""
        num_tokens = len(step.plain_tokens)
        if step.plain_ids:
            if step.plain_ids is not self._plain_ids:
                self._plain_ids = step.plain_ids
                entries = map(self._entries.get, step.plain_ids)
                self._plain = StepSender([None if entry is None else entry.stream for entry in entries])
            self._plain.send(step.plain_tokens)
        for request_id, engine_delta in step.deltas:
            num_tokens += len(engine_delta.token_ids)
            entry = self._entries.get(request_id)
            if entry is None:
                continue  # closed since the step began
            delta = engine_delta
            if entry.transferred_blocks:
                delta = _without_transferred(delta, entry.transferred_blocks * self.block_size)
            if entry.stages is None:
                entry.stream.send(delta)
                if delta.stages is not None:
                    self.on_stages(delta.stages)
            else:
                entry.stream.send(msgspec.structs.replace(delta, stages=entry.stages))
                entry.stages = None
            if delta.cached_tokens is not None and not delta.index:
                self.on_first_token(entry, delta.cached_tokens)
            if delta.finish is not None:
                entry.num_choices_left -= 1
                if entry.num_choices_left == 0:
                    self.close(request_id, FINISHED)
                    self.metrics.finish_counts[delta.finish] += 1
                    entry.stream.end()
        for request_id, failure in step.failed:
            entry = self.close(request_id, FAILED)
            if entry is not None:
                entry.stream.end(from_info(failure))
        return num_tokens

    def forget_streams(self) -> None:
        """Look up the streams of the next batch again, since one was replaced."""
        self._plain_ids = ()

    def close(self, request_id: RequestId, outcome: str) -> OpenRequest | None:
        """Remove a request and cancel its timers and preparation. None if it is closed already."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.preparation is not None and entry.preparation is not asyncio.current_task():
            entry.preparation.cancel()
        if entry.deadline is not None:
            entry.deadline.cancel()
        self.metrics.on_end(outcome, self._now() - entry.opened_at)
        if entry.is_submitted:
            self.num_submitted -= 1
            if not self.num_submitted:
                self._progress.on_idle()
        return entry


class RequestProgress:
    """Calls `on_stuck` with a reason if no step comes while there is work, and `on_moving` at the next step."""

    def __init__(
        self,
        clock: Clock,
        stuck_after_s: float,
        on_stuck: Callable[[str], None],
        on_moving: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._limit_s = stuck_after_s * _FIRST_STEP_FACTOR
        self._stuck_after_s = stuck_after_s
        self._on_stuck = on_stuck
        self._on_moving = on_moving
        self._timer = LazyTimer(asyncio.get_running_loop(), self._expired)
        self._since: float | None = None
        """Time of the latest step, or of the first work of an idle engine; None without work."""
        self.stuck = False

    @property
    def age_s(self) -> float:
        """Time that work has waited for a step; 0 without work."""
        return 0.0 if self._since is None else self._clock.monotonic() - self._since

    def on_work(self) -> None:
        """An idle engine got work."""
        self._since = self._clock.monotonic()
        if not self.stuck:
            self._timer.arm(self._limit_s)

    def on_step(self, now: float, has_work: bool) -> None:
        self._limit_s = self._stuck_after_s
        if self.stuck:
            self.stuck = False
            self._on_moving()
        if has_work:
            self._since = now
            self._timer.arm(self._limit_s)
        else:
            self.on_idle()

    def on_idle(self) -> None:
        self._since = None
        self._timer.disarm()

    def close(self) -> None:
        self._timer.close()

    def _expired(self) -> None:
        self.stuck = True
        self._on_stuck(f"no step for {self.age_s:.0f} s with requests waiting")


def _without_transferred(delta: Delta, num_tokens: int) -> Delta:
    """Do not report transferred prompt tokens as cached: a prefill worker computed them for this request."""
    if delta.cached_tokens is not None:
        delta = msgspec.structs.replace(delta, cached_tokens=max(delta.cached_tokens - num_tokens, 0))
    if delta.usage is not None:
        cached_tokens = max(delta.usage.cached_tokens - num_tokens, 0)
        usage = msgspec.structs.replace(delta.usage, cached_tokens=cached_tokens)
        delta = msgspec.structs.replace(delta, usage=usage)
    return delta
