"""Replay of a trace on a twin: every request at its time, measured like a load generator.

Statistics and reports are those of `kvolt.bench.load`, so that a twin's report can be compared with a real run's.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from xxhash import xxh3_64_intdigest as xxh3

from kvolt.bench.load.sample import Failure, Sample
from kvolt.bench.load.sla import Sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.traces import reblock
from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.core.trace import TraceRecord
from kvolt.journey.journey import Journey
from kvolt.journey.migration import ChoiceTokens
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import Scope, TaskGroup
from kvolt.testing.virtual.loop import run_virtual
from kvolt.twin.cluster import MODEL, TwinCluster, TwinSettings
from kvolt.twin.engine_watch import ClusterWatch
from kvolt.twin.misses import Misses

_PATIENCE_S = 10 * 86_400.0
_DEADLINES = Deadlines(connect_s=60.0, first_s=_PATIENCE_S, between_s=_PATIENCE_S, total_s=_PATIENCE_S)
"""Requests never time out: their latency is the result."""

_OWN = b"a prompt of its own"
"""Hash input for prompts without hash ids, which share nothing."""

OnSample = Callable[[Sample], None]


def new_tally(settings: TwinSettings, sla: Sla | None = None) -> Tally:
    return Tally(sla, random.Random(f"{settings.seed}/tally").random)


def run_twin(
    settings: TwinSettings,
    records: Iterable[TraceRecord],
    tally: Tally,
    on_sample: OnSample = lambda sample: None,
) -> None:
    """Replay the trace on virtual time into `tally`; deterministic."""
    TwinRun(settings, tally).run(records, on_sample)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Reduce garbage collections: a run creates almost no cyclic garbage.

    `gc.unfreeze` has no scope: a process that has frozen its objects keeps them frozen.
    """
    previous = gc.get_threshold()
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(100_000, 10, 100)
    try:
        yield
    finally:
        gc.set_threshold(*previous)
        if not is_frozen:
            gc.unfreeze()


class TwinRun:
    """One run and its statistics; call `run` once. Statistics until an interrupt are kept."""

    def __init__(self, settings: TwinSettings, tally: Tally) -> None:
        self.settings = settings
        self.tally = tally
        self.watch = ClusterWatch(settings.engine)
        self.misses = Misses(tally.sla, self.watch.prompt_alone_s)
        self.is_interrupted = False
        self.cluster: TwinCluster | None = None
        """Set during the run."""
        self._replay: Replay | None = None

    def run(self, records: Iterable[TraceRecord], on_sample: OnSample = lambda sample: None) -> None:
        """Run to the end of the trace, or until `end`."""
        settings = self.settings

        async def main() -> None:
            cluster = self.cluster = await TwinCluster.start(settings, self.watch)
            try:
                self._replay = Replay(cluster, self, on_sample)
                if not self.is_interrupted:
                    await self._replay.run(reblock(records, settings.engine.block_size))
            finally:
                self._replay = self.cluster = None
                await cluster.close()

        with _rare_collections():
            run_virtual(main, until_s=_PATIENCE_S, max_iterations=10**10)

    def end(self) -> None:
        """End the run early; running requests count as interrupted. Callable from a signal handler."""
        self.is_interrupted = True
        if self._replay is not None:
            self._replay.end()


class Replay:
    """Replays one trace on one cluster."""

    def __init__(self, cluster: TwinCluster, run: TwinRun, on_sample: OnSample) -> None:
        self._cluster = cluster
        self._tally = run.tally
        self._watch = run.watch
        self._misses = run.misses
        self._on_sample = on_sample
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._watch.origin_s = self._loop.time()
        self._scope = Scope("replay")
        self._turns: dict[str, tuple[int, asyncio.Future[None]]] = {}
        """Number of turns and end of the latest turn by session."""

    async def run(self, records: Iterable[TraceRecord]) -> None:
        requests = TaskGroup("requests")
        try:
            async with self._scope:
                self._scope.start(self._arrive(records, requests), "arrivals")
        finally:
            self._watch.ended_s = self._loop.time() - self._origin_s
            await requests.close()

    def end(self) -> None:
        """Stop arrivals and abandon running requests."""
        self._loop.call_soon(self._scope.cancel)

    async def _arrive(self, records: Iterable[TraceRecord], requests: TaskGroup) -> None:
        for number, record in enumerate(records):
            due = self._origin_s + record.timestamp / 1000.0
            await asyncio.sleep(due - self._loop.time())
            requests.start(self._send(number, record), f"request {number}")
        await requests.drain()

    async def _send(self, number: int, record: TraceRecord) -> None:
        turn = 0
        turn_end: asyncio.Future[None] = self._loop.create_future()
        if record.session is not None:
            previous = self._turns.get(record.session)
            turn = previous[0] + 1 if previous is not None else 0
            self._turns[record.session] = (turn, turn_end)
            if previous is not None and record.delay is not None:  # a turn follows the previous response
                await previous[1]
                await asyncio.sleep(record.delay / 1000.0)
        watch = ResponseWatch(number, turn, record, self._origin_s, self._tally.latencies["itl"].record)
        self._tally.started(watch.due_s)
        request = self._request(number, record)
        journey = Journey(self._cluster.journey_context, request, watch, _DEADLINES)
        try:
            await journey.start()
            sample = await watch.done
        except KvoltError as error:
            sample = watch.sample(error.code, error.message)
        except asyncio.CancelledError:  # the run was ended
            journey.cancel()
            self._count(request, watch.sample(Failure.INTERRUPTED, "the run was ended"))
            raise
        self._count(request, sample)
        turn_end.set_result(None)

    def _count(self, request: Request, sample: Sample) -> None:
        self._tally.add(sample)
        self._misses.add(sample, self._watch.end_visit(request.request_id))
        self._on_sample(sample)

    def _request(self, number: int, record: TraceRecord) -> Request:
        num_full = record.input_length // record.block_size
        own = xxh3(_OWN, seed=number) >> 2
        hashes = record.hash_ids[:num_full] or range(own, own + num_full)
        return Request(
            request_id=RequestId(f"r{number}"),
            model=MODEL,
            token_ids=(),
            trace_prompt_length=record.input_length,  # the tokens are unknown; blocks are identified by their hashes
            block_size=record.block_size,
            sequence_hashes=cast("tuple[SequenceHash, ...]", tuple(hashes)),
            stop=StopConditions(max_tokens=max(1, record.output_length), ignore_eos=True),
            sampling=Sampling(seed=number),
        )


class ResponseWatch:
    """Receiver that measures one response like a client."""

    steps: StepSink | None = None

    def __init__(
        self,
        number: int,
        turn: int,
        record: TraceRecord,
        origin_s: float,
        on_gaps: Callable[[float, int], None],
    ) -> None:
        self._number = number
        self._turn = turn
        self._record = record
        self._on_gaps = on_gaps
        self._origin_s = origin_s
        self._loop = asyncio.get_running_loop()
        self.due_s = self._loop.time() - origin_s
        self.done: asyncio.Future[Sample] = self._loop.create_future()
        self._first_s: float | None = None
        self._second_s: float | None = None
        self._last_s = 0.0
        self._max_gap_s = 0.0
        self._num_tokens = 0
        self._cached: int | None = None

    @property
    def has_started(self) -> bool:
        return self._num_tokens > 0

    def received_tokens(self) -> ChoiceTokens:
        return [(0,) * self._num_tokens]  # trace prompts have a length but no tokens

    def on_item(self, delta: Any) -> None:
        now = self._loop.time() - self._origin_s
        assert isinstance(delta, Delta)
        count = len(delta.token_ids)
        if self._num_tokens:
            # Several tokens at once are those of merged steps: distribute them evenly.
            gap_s = (now - self._last_s) / count
            self._on_gaps(gap_s, count)
            self._max_gap_s = max(self._max_gap_s, gap_s)
            if self._second_s is None:
                self._second_s = self._last_s + gap_s
        else:
            self._first_s = now
        if delta.cached_tokens is not None:
            self._cached = delta.cached_tokens
        self._last_s = now
        self._num_tokens += count

    def on_end(self, error: KvoltError | None) -> None:
        if not self.done.done():
            self.done.set_result(self.sample() if error is None else self.sample(error.code, error.message))

    def sample(self, error: str | None = None, message: str | None = None) -> Sample:
        """Measurement of the ended request."""
        return Sample(
            number=self._number,
            session=self._number,
            turn=self._turn,
            due_s=self.due_s,
            started_s=self.due_s,
            sent_s=self.due_s,
            first_s=self._first_s,
            second_s=self._second_s,
            last_s=self._last_s if self._num_tokens else None,
            end_s=self._loop.time() - self._origin_s,
            max_gap_s=self._max_gap_s,
            num_events=self._num_tokens,
            input_tokens=self._record.input_length,
            output_tokens=self._num_tokens,
            cached_tokens=self._cached,
            error=error,
            message=message,
        )
