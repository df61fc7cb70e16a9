"""Requests that a worker has, each with the stream for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvolt.core.delta import StageTimes
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.runtime.plane.port import IncomingStream
from kvolt.worker.metrics import WorkerMetrics
from kvolt.worker.progress import Progress


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


class OpenRequests:
    """See the module."""

    def __init__(self, now: Callable[[], float], metrics: WorkerMetrics, progress: Progress) -> None:
        self._now = now
        self._metrics = metrics
        self._progress = progress
        self._entries: dict[RequestId, OpenRequest] = {}
        self.num_submitted = 0
        """Requests that the engine has."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate over a copy, so that requests may be closed during the iteration."""
        return iter(list(self._entries))

    def get(self, request_id: RequestId) -> OpenRequest | None:
        return self._entries.get(request_id)

    def stream_of(self, request_id: RequestId) -> IncomingStream | None:
        entry = self._entries.get(request_id)
        return entry.stream if entry is not None else None

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
        self._metrics.on_prompt(entry.num_prompt_tokens, cached_tokens, self._now() - entry.opened_at)

    def close(self, request_id: RequestId, outcome: str) -> OpenRequest | None:
        """Remove a request and cancel its timers and preparation. None if it is closed already."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.preparation is not None and entry.preparation is not asyncio.current_task():
            entry.preparation.cancel()
        if entry.deadline is not None:
            entry.deadline.cancel()
        self._metrics.on_end(outcome, self._now() - entry.opened_at)
        if entry.is_submitted:
            self.num_submitted -= 1
            if not self.num_submitted:
                self._progress.on_idle()
        return entry
