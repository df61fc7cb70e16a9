"""OpenRequests: the requests of a worker, each with the stream that carries its answer."""

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
    """How long what was brought here for it took, until that is told."""
    handing_over: asyncio.Task[None] | None = None
    """What is done before the engine has it, or in its place."""
    moved_blocks: int = 0
    """Of its prompt, those that were computed for it elsewhere: nothing that was found."""
    is_inside: bool = False
    """Whether the engine has it."""


class OpenRequests:
    """See the module."""

    def __init__(self, now: Callable[[], float], metrics: WorkerMetrics, progress: Progress) -> None:
        self._now = now
        self._metrics = metrics
        self._progress = progress
        self._entries: dict[RequestId, OpenRequest] = {}
        self.num_inside = 0
        """That the engine has, and is to make steps for."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[RequestId]:
        """As of now: they may be closed meanwhile."""
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
        is_inside: bool = True,
    ) -> OpenRequest:
        """With what is left of its time, if that is known."""
        entry = self._entries[request.request_id] = OpenRequest(
            stream, len(request.open_choices), request.num_prompt_tokens, self._now()
        )
        if is_inside:
            self.enter(entry)
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(
                request.deadline_s, on_deadline, request.request_id, request.deadline_s
            )
        return entry

    def enter(self, entry: OpenRequest) -> None:
        """The engine has it from now on."""
        entry.is_inside = True
        self.num_inside += 1
        if self.num_inside == 1:
            self._progress.begin()

    def prompt_done(self, entry: OpenRequest, cached_tokens: int) -> None:
        """Its first token is there."""
        self._metrics.on_prompt(entry.num_prompt_tokens, cached_tokens, self._now() - entry.opened_at)

    def close(self, request_id: RequestId, outcome: str) -> OpenRequest | None:
        """Over, one way or another; None for one that is over already."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        if entry.handing_over is not None and entry.handing_over is not asyncio.current_task():
            entry.handing_over.cancel()
        if entry.deadline is not None:
            entry.deadline.cancel()
        self._metrics.on_end(outcome, self._now() - entry.opened_at)
        if entry.is_inside:
            self.num_inside -= 1
            if not self.num_inside:
                self._progress.rest()
        return entry
