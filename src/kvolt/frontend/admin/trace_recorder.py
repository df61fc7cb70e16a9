"""Records the requests of this process as a trace: times, lengths and block ids, without text.

A recording starts when a reader asks for it over the request plane, and ends when the reader leaves. A slow reader
only loses records of its own trace: what exceeds the buffer is dropped and counted. `trace_ids` anonymizes blocks.

    arrived() -> RecordedRequest      a request starts; None without recordings
    RecordedRequest.ended(...)        it has ended, in whatever way: one record per choice
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.core.trace import TraceRecord
from kvolt.frontend.admin.trace_ids import MAX_KEY_BYTES, MIN_KEY_BYTES, TraceIds
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS, EndpointServer, msgpack_decoder

log = logging.getLogger(__name__)

TRACE_ENDPOINT = f"{OWN_ENDPOINTS}frontend.trace"
"""Endpoint on the request plane of every frontend; a drain does not wait for it."""

MAX_RECORDINGS = 4
MAX_DURATION_S = 7 * 24 * 3600.0
MAX_PENDING_BYTES = 8 << 20
"""Limit of unread records of one recording. Overflow policy: new records are dropped and counted."""

_PART_BYTES = 32 << 10
"""Approximate size of a part. A reader without credit leaves at most some hundreds of parts in the send buffers."""
_REPORT_S = 0.25
_RECORD_BYTES = 256
_ID_BYTES = 40
"""Approximate memory of a record and of each of its ids."""


class RecordTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Request to start a recording; answered by RecordedParts until it ends."""

    key: bytes
    """Key of the block ids. Processes with the same key give equal blocks equal ids."""
    duration_s: float | None = None
    """Later arrivals are not recorded; None: until the reader leaves."""
    model: str | None = None
    """Record only this model or adapter."""

    def __post_init__(self) -> None:
        if not MIN_KEY_BYTES <= len(self.key) <= MAX_KEY_BYTES:
            raise InvalidRequest(
                f"the key must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(self.key)}",
                param="key",
            )
        if self.duration_s is not None and not 0 < self.duration_s <= MAX_DURATION_S:
            raise InvalidRequest(
                f"duration_s must be at most {MAX_DURATION_S:g}, not {self.duration_s:g}",
                param="duration_s",
            )


class RecordedPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that ended since the previous part, in order, and the totals so far."""

    records: tuple[TraceRecord, ...] = ()
    """Timestamps are milliseconds since this process's first part."""
    running: int = 0
    """Recorded requests that have not ended."""
    dropped: int = 0
    """Records dropped because the reader was too slow."""
    unanswered: int = 0
    """Requests that ended without a token, whose output length is unknown."""


class _Pending(NamedTuple):
    record: TraceRecord
    size_bytes: int


class Recording:
    """One reader's recording. Pure: times are arguments."""

    def __init__(self, recording_request: RecordTrace, now: float) -> None:
        self._ids = TraceIds(recording_request.key)
        self._model = recording_request.model
        self._started_at = now
        self._until = math.inf if recording_request.duration_s is None else now + recording_request.duration_s
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._running = 0
        self._dropped = 0
        self._unanswered = 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def is_over(self, now: float) -> bool:
        """Whether its duration has elapsed and all its requests have ended."""
        return now >= self._until and not self._running

    def begin(self, request: Request, now: float) -> bool:
        """Whether a request that starts now is recorded. If so, `end` must follow."""
        is_selected = self._model is None or self._model in (request.model, request.lora)
        if not is_selected or now >= self._until:
            return False
        self._running += 1
        return True

    def end(self, arrived_at: float, outputs: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """Add the requests of an HTTP request that has ended, each with the output lengths of its choices."""
        self._running -= 1
        if not any(length for _, lengths in outputs for length in lengths):
            self._unanswered += 1
            return
        # A request that arrived while the recording was being started has a slightly earlier time.
        timestamp = max(arrived_at - self._started_at, 0.0) * 1e3
        for request, lengths in outputs:
            self._add(request, lengths, timestamp)

    def _add(self, request: Request, lengths: Sequence[int], timestamp: float) -> None:
        num_tokens, block_size = len(request.token_ids), request.block_size
        assert block_size is not None, "the frontend sets sequence hashes"
        size_bytes = _RECORD_BYTES + _ID_BYTES * -(-num_tokens // block_size)
        if self._pending_bytes + size_bytes * len(lengths) > MAX_PENDING_BYTES:
            self._dropped += len(lengths)
            return
        block_ids = self._ids.blocks(request)
        routing = request.routing
        for length in lengths:
            record = TraceRecord(
                timestamp=timestamp,
                input_length=num_tokens,
                output_length=length,
                hash_ids=block_ids,
                block_size=block_size,
                session=self._ids.name(routing.session),
                tenant=self._ids.name(routing.tenant),
            )
            self._pending.append(_Pending(record, size_bytes))
            self._pending_bytes += size_bytes

    def next_part(self) -> RecordedPart:
        """Remove and return some pending records, at least one if there is any."""
        records: list[TraceRecord] = []
        part_bytes = 0
        while self._pending and (not records or part_bytes + self._pending[0].size_bytes <= _PART_BYTES):
            record, size_bytes = self._pending.popleft()
            records.append(record)
            part_bytes += size_bytes
        self._pending_bytes -= part_bytes
        return RecordedPart(
            records=tuple(records),
            running=self._running,
            dropped=self._dropped,
            unanswered=self._unanswered,
        )


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One HTTP request for its recordings. Call `ended` exactly once."""

    recordings: Sequence[Recording]
    arrived_at: float
    requests: Sequence[Request]
    """One request per prompt."""

    def ended(self, num_tokens: Sequence[int]) -> None:
        """Record the end. `num_tokens`: output tokens of each choice of the first prompt, then of the second, and so
        on."""
        per_prompt = len(num_tokens) // len(self.requests)
        outputs = [
            (request, num_tokens[number * per_prompt : (number + 1) * per_prompt])
            for number, request in enumerate(self.requests)
        ]
        for recording in self.recordings:
            recording.end(self.arrived_at, outputs)


class TraceRecorder:
    """All recordings of this process."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._recordings: list[Recording] = []
        self._closing = asyncio.Event()

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def register_endpoint(self, server: EndpointServer) -> None:
        server.register(
            TRACE_ENDPOINT, InstanceId(""), server.wrap_generator(self.serve, msgpack_decoder(RecordTrace))
        )

    def arrived(self, at: float, requests: Sequence[Request]) -> RecordedRequest | None:
        """Record a request that arrived at `at` and is now sent to workers."""
        if not self._recordings:
            return None
        now = self._now()
        recordings = [recording for recording in self._recordings if recording.begin(requests[0], now)]
        return RecordedRequest(recordings, at, requests) if recordings else None

    async def serve(self, recording_request: RecordTrace) -> AsyncIterator[RecordedPart]:
        """Stream a recording: a first part immediately, to mark its start, then one at least every quarter second."""
        if len(self._recordings) >= MAX_RECORDINGS:
            raise Overloaded(
                f"too many recordings: the limit is {MAX_RECORDINGS}",
                queue="recordings",
                limit=MAX_RECORDINGS,
            )
        recording = Recording(recording_request, self._now())
        self._recordings.append(recording)
        log.info("trace recording started: contains times, lengths and block ids, no text")
        try:
            while True:
                is_last = self._closing.is_set() or recording.is_over(self._now())
                yield recording.next_part()
                if not recording.has_pending:
                    if is_last:
                        return
                    await self._pause()
        finally:
            self._recordings.remove(recording)
            log.info("trace recording ended")

    def close(self) -> None:
        """End all recordings after their pending records. Requests that are still running are not recorded."""
        self._closing.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_REPORT_S):
                await self._closing.wait()
        except TimeoutError:
            pass
