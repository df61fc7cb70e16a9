"""Small deltas on many streams while long messages go over another one of the same connection.

A delta carries the time at which its step was due, not the time at which it was sent: a server that
is late because of the long message must not hide it. Both processes read one monotonic clock.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks.runtime.over_kvolt import ENDPOINT, KvoltSide, StreamServer
from benchmarks.runtime.workload import Job, Tally, Work

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError

BULK = "kvolt bulk"


class BulkServer(StreamServer):
    """The first stream gets the long messages, one after the other; the rest get deltas on time."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, more_streams=1)

    async def produce(self, work: Work) -> dict[str, Any]:
        bulk, *streams = self._streams
        if work.payload_bytes:
            payload = bytes(work.payload_bytes)
            bulk.on_writable = lambda: bulk.send(payload)
            bulk.send(payload)
        start = time.monotonic()
        for step in range(1, work.steps + 1):
            due = start + step * work.interval_s
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            delta = Delta(token_ids=(int(due * 1e9),))
            for stream in streams:
                stream.send(delta)
        bulk.on_writable = None
        return {}


class BulkClient(KvoltSide):
    """Sink of the long messages; one for the deltas of each stream are `_DelaySink`s."""

    def __init__(self, job: Job) -> None:
        super().__init__("client", 2)
        self._job = job
        self._tally = Tally(job.streams)
        self._delays_ms: list[float] = []
        self._num_payloads = 0

    def on_item(self, item: bytes) -> None:
        self._num_payloads += 1

    def on_end(self, error: KvoltError | None) -> None:
        pass

    async def open(self) -> None:
        await self.runtime.start()
        client = await self.runtime.client(ENDPOINT, static=[self._job.address])
        await client.call(0, self)
        for number in range(self._job.streams):
            await client.call(number, _DelaySink(self._tally, self._delays_ms))

    async def consume(self, work: Work) -> dict[str, Any]:
        self._delays_ms.clear()
        before = self._num_payloads
        await self._tally.consume(work)
        cuts = statistics.quantiles(self._delays_ms, n=100)
        delays = {"p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(self._delays_ms)}
        return {**delays, "payloads": self._num_payloads - before}


class _DelaySink:
    def __init__(self, tally: Tally, delays_ms: list[float]) -> None:
        self._tally = tally
        self._delays_ms = delays_ms

    def on_item(self, item: Delta) -> None:
        now_ns = time.monotonic_ns()
        # Merged deltas were delayed each by its own time.
        self._delays_ms.extend((now_ns - due_ns) / 1e6 for due_ns in item.token_ids)
        self._tally.add(len(item.token_ids))

    def on_end(self, error: KvoltError | None) -> None:
        self._tally.fail(error)


async def serve(job: Job) -> BulkServer:
    server = BulkServer(job)
    await server.start()
    return server


async def connect(job: Job) -> BulkClient:
    return BulkClient(job)
