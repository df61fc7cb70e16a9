"""Records what is asked of this process as a trace, while somebody wants it: times, lengths, block ids. No text.

Owns the recordings under way and what their readers have not been told yet. Off until a reader asks, over the request
plane; over when the reader leaves. A reader that is slow or stuck costs requests of its trace and nothing else: what
does not fit into the bound is dropped and counted. Which text a block was is not known past `trace_ids`.

    arrived() -> RecordedRequest      a request begins; None while nobody records
    RecordedRequest.ended(...)        it is over, however that came: a record per choice
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
from kvolt.frontend.trace_ids import MAX_KEY_BYTES, MIN_KEY_BYTES, TraceIds
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS, EndpointServer, decoder

log = logging.getLogger(__name__)

TRACE_ENDPOINT = f"{OWN_ENDPOINTS}frontend.trace"
"""On the request plane of every frontend; no work that a drain would wait for."""

MAX_RECORDINGS = 4
MAX_DURATION_S = 7 * 24 * 3600.0
MAX_PENDING_BYTES = 8 << 20
"""Of one recording, waiting for its reader. Overflow rule: new records are dropped and counted."""

_PART_BYTES = 32 << 10
"""A reader without credit leaves some hundreds of parts in our buffers at most."""
_TELL_S = 0.25
_RECORD_BYTES = 256
_ID_BYTES = 40
"""What a record and each of its ids take in memory, about."""


class RecordTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a recording from now on; answered by RecordedParts until it is over."""

    key: bytes
    """Of the block ids. Several processes that get the same give equal blocks equal ids."""
    duration_s: float | None = None
    """What arrives later is not recorded; None: until the reader leaves."""
    model: str | None = None
    """Only this model or adapter."""

    def __post_init__(self) -> None:
        if not MIN_KEY_BYTES <= len(self.key) <= MAX_KEY_BYTES:
            raise InvalidRequest(
                f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, this one {len(self.key)}", param="key"
            )
        if self.duration_s is not None and not 0 < self.duration_s <= MAX_DURATION_S:
            raise InvalidRequest(
                f"a recording may last up to {MAX_DURATION_S:g} s, not {self.duration_s:g}",
                param="duration_s",
            )


class RecordedPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ended since the part before, in the order of ending; and the counts so far."""

    records: tuple[TraceRecord, ...] = ()
    """Timestamps are milliseconds from this process's first part on."""
    running: int = 0
    """Requests of the recording that have not ended."""
    dropped: int = 0
    """Records that the reader was too slow for."""
    unanswered: int = 0
    """Requests that ended without a token: what they would have cost is not known."""


class _Pending(NamedTuple):
    record: TraceRecord
    size_bytes: int


class Recording:
    """One reader's recording. Pure: the time comes with each call."""

    def __init__(self, wanted: RecordTrace, now: float) -> None:
        self._ids = TraceIds(wanted.key)
        self._model = wanted.model
        self._started_at = now
        self._until = math.inf if wanted.duration_s is None else now + wanted.duration_s
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._running = 0
        self._dropped = 0
        self._unanswered = 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def is_over(self, now: float) -> bool:
        """Its time is over, and so are the requests that arrived in it."""
        return now >= self._until and not self._running

    def begin(self, request: Request, now: float) -> bool:
        """Whether a request that begins now is of this recording. Then `end` must follow."""
        wanted = self._model is None or self._model in (request.model, request.lora)
        if not wanted or now >= self._until:
            return False
        self._running += 1
        return True

    def end(self, arrived_at: float, outputs: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """A request is over; of each of its prompts, how long the answers were."""
        self._running -= 1
        if not any(length for _, lengths in outputs for length in lengths):
            self._unanswered += 1
            return
        # One that came while the recording was asked for began before it, by less than it takes to tokenize.
        timestamp = max(arrived_at - self._started_at, 0.0) * 1e3
        for request, lengths in outputs:
            self._add(request, lengths, timestamp)

    def _add(self, request: Request, lengths: Sequence[int], timestamp: float) -> None:
        num_tokens, block_size = len(request.token_ids), request.block_size
        assert block_size is not None, "the frontend hashes what it sends"
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

    def take(self) -> RecordedPart:
        """Some of what is pending, at least one record if there is any."""
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
    """One HTTP request that recordings wait for. `ended` exactly once."""

    recordings: Sequence[Recording]
    arrived_at: float
    requests: Sequence[Request]
    """One per prompt."""

    def ended(self, num_tokens: Sequence[int]) -> None:
        """`num_tokens`: of each choice of the first prompt, then of the second ..."""
        per_prompt = len(num_tokens) // len(self.requests)
        outputs = [
            (request, num_tokens[number * per_prompt : (number + 1) * per_prompt])
            for number, request in enumerate(self.requests)
        ]
        for recording in self.recordings:
            recording.end(self.arrived_at, outputs)


class TraceRecorder:
    """The recordings of this process."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._recordings: list[Recording] = []
        self._closing = asyncio.Event()

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def add_to(self, server: EndpointServer) -> None:
        server.add(TRACE_ENDPOINT, InstanceId(""), server.generator(self.serve, decoder(RecordTrace)))

    def arrived(self, at: float, requests: Sequence[Request]) -> RecordedRequest | None:
        """A request that came at `at` is sent to workers now."""
        if not self._recordings:
            return None
        now = self._now()
        taking = [recording for recording in self._recordings if recording.begin(requests[0], now)]
        return RecordedRequest(taking, at, requests) if taking else None

    async def serve(self, wanted: RecordTrace) -> AsyncIterator[RecordedPart]:
        """At once a first part, so that the reader knows when this began; then one at least every quarter second."""
        if len(self._recordings) >= MAX_RECORDINGS:
            raise Overloaded(
                f"{MAX_RECORDINGS} recordings are under way here, which is the most",
                queue="recordings",
                limit=MAX_RECORDINGS,
            )
        recording = Recording(wanted, self._now())
        self._recordings.append(recording)
        log.info("a trace is being recorded: times, lengths and block ids, no text")
        try:
            while True:
                is_last = self._closing.is_set() or recording.is_over(self._now())
                yield recording.take()
                if not recording.has_pending:
                    if is_last:
                        return
                    await self._pause()
        finally:
            self._recordings.remove(recording)
            log.info("a trace is no longer recorded")

    def close(self) -> None:
        """Every reader gets what is there, and the end. What still runs is in no trace."""
        self._closing.set()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(_TELL_S):
                await self._closing.wait()
        except TimeoutError:
            pass
