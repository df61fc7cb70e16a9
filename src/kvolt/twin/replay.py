"""A trace through a twin: every request at its time, measured as a load generator would.

Owns arrivals and what a client sees of each answer. What is counted and told is `kvolt.bench.load`'s: the twin's
report is that of a real run, so that the two can be compared.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import Sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.traces import reblock
from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId, SequenceHash
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.core.trace import TraceRecord
from kvolt.journey.journey import Journey, Road
from kvolt.runtime.call import Deadlines
from kvolt.runtime.streams import StepSink
from kvolt.runtime.tasks import Crew
from kvolt.testing.loop import run_virtual
from kvolt.twin.cluster import MODEL, TwinCluster, TwinSettings

_PATIENCE_S = 10 * 86_400.0
_DEADLINES = Deadlines(connect_s=60.0, first_s=_PATIENCE_S, between_s=_PATIENCE_S, total_s=_PATIENCE_S)
"""A request of a trace waits as long as it takes: how long is what the twin is asked for."""

_OWN = 1 << 62
"""Where the hashes of prompts begin of which the trace says nothing: they share nothing."""

OnSample = Callable[[Sample], None]


def new_tally(settings: TwinSettings, sla: Sla | None = None) -> Tally:
    return Tally(sla, random.Random(f"{settings.seed}/tally").random)


def run_twin(
    settings: TwinSettings,
    records: Iterable[TraceRecord],
    tally: Tally,
    on_sample: OnSample = lambda sample: None,
) -> None:
    """All of the trace, on virtual time, into `tally`; the same for the same arguments, on any machine.

    What was counted before an interrupt stays counted.
    """

    async def main() -> None:
        cluster, road = await TwinCluster.start(settings)
        try:
            await Replay(road, tally, on_sample).run(reblock(records, settings.engine.block_size))
        finally:
            await cluster.close()

    run_virtual(main, until_s=_PATIENCE_S, max_iterations=10**10)


class Replay:
    """One trace on one road."""

    def __init__(self, road: Road, tally: Tally, on_sample: OnSample) -> None:
        self._road = road
        self._tally = tally
        self._on_sample = on_sample
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()
        self._turns: dict[str, tuple[int, asyncio.Future[None]]] = {}
        """Of each session: how many there were, and the end of the last."""

    async def run(self, records: Iterable[TraceRecord]) -> None:
        requests = Crew("requests")
        try:
            for number, record in enumerate(records):
                due = self._origin_s + record.timestamp / 1000.0
                await asyncio.sleep(due - self._loop.time())
                requests.start(self._ask(number, record), f"request {number}")
            await requests.drain()
        finally:
            await requests.close()

    async def _ask(self, number: int, record: TraceRecord) -> None:
        turn = 0
        over: asyncio.Future[None] = self._loop.create_future()
        if record.session is not None:
            before = self._turns.get(record.session)
            turn = before[0] + 1 if before is not None else 0
            self._turns[record.session] = (turn, over)
            if before is not None and record.delay is not None:  # nobody answers before having read
                await before[1]
                await asyncio.sleep(record.delay / 1000.0)
        watch = Watch(number, turn, record, self._origin_s, self._tally.latencies["itl"].record)
        self._tally.started(watch.due_s)
        journey = Journey(self._road, self._request(number, record), watch, _DEADLINES)
        try:
            await journey.begin()
        except KvoltError as error:
            watch.on_end(error)
        sample = await watch.done
        self._tally.add(sample)
        self._on_sample(sample)
        over.set_result(None)

    def _request(self, number: int, record: TraceRecord) -> Request:
        num_full = record.input_length // record.block_size
        own = number << 32 | _OWN
        hashes = record.hash_ids[:num_full] or range(own, own + num_full)
        return Request(
            request_id=RequestId(f"r{number}"),
            model=MODEL,
            token_ids=(0,)
            * record.input_length,  # nobody looks at them: the blocks are known by their hashes
            block_size=record.block_size,
            sequence_hashes=tuple([SequenceHash(each) for each in hashes]),
            stop=StopConditions(max_tokens=max(1, record.output_length), ignore_eos=True),
            sampling=Sampling(seed=number),
        )


class Watch:
    """What a client sees of one answer; a Receiver."""

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
    def has_begun(self) -> bool:
        return self._num_tokens > 0

    def on_item(self, delta: Any) -> None:
        now = self._loop.time() - self._origin_s
        assert isinstance(delta, Delta)
        count = len(delta.token_ids)
        if self._num_tokens:
            # Several at once are those of steps that are alike: they came one after the other.
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
        self.done.set_result(
            Sample(
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
                error=error.code if error is not None else None,
                message=error.message if error is not None else None,
            )
        )
