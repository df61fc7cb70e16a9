"""Small deltas on many streams while long messages go over another one of the same connection.

A delta carries the time at which its step was due, not the time at which it was sent: a server that
is late because of the long message must not hide it. Both processes read one monotonic clock.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from benchmarks.runtime.over_kvolt import ENDPOINT, KvoltSide
from benchmarks.runtime.workload import Arrivals, Job, Tally, Work

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.runtime.plane.served_stream import ServedStream

BULK = "kvolt bulk"


class BulkServer(KvoltSide):
    """The first stream gets the long messages, one after the other; the rest get deltas on time."""

    def __init__(self, job: Job) -> None:
        super().__init__("server", 1)
        self._streams: list[ServedStream] = []
        self._arrivals = Arrivals(job.streams + 1)

    async def start(self) -> None:
        await self.runtime.start()
        await self.runtime.serve_streams(ENDPOINT, self._on_stream)

    def _on_stream(self, stream: ServedStream) -> None:
        stream.body = b""
        self._streams.append(stream)
        self._arrivals.add()

    async def wait_open(self) -> None:
        await self._arrivals.wait()

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


class _DelaySink:
    def __init__(self, tally: Tally, delays_ms: list[float]) -> None:
        self._tally = tally
        self._delays_ms = delays_ms

    def on_item(self, item: Delta) -> None:
        now_ns = time.monotonic_ns()
        # Merged deltas were delayed each by its own time.
        self._delays_ms.extend((now_ns - due_ns) / 1e6 for due_ns in item.token_ids)
        tally = self._tally
        tally.tokens += len(item.token_ids)
        if tally.tokens >= tally.expected:
            tally.reach()

    def on_end(self, error: KvoltError | None) -> None:
        self._tally.fail(error)


class _PayloadSink:
    def __init__(self) -> None:
        self.num_payloads = 0

    def on_item(self, item: bytes) -> None:
        self.num_payloads += 1

    def on_end(self, error: KvoltError | None) -> None:
        pass


class BulkClient(KvoltSide):
    def __init__(self, job: Job) -> None:
        super().__init__("client", 2)
        self._job = job
        self._tally = Tally()
        self._delays_ms: list[float] = []
        self._payloads = _PayloadSink()

    async def open(self) -> None:
        await self.runtime.start()
        client = await self.runtime.client(ENDPOINT, static=[self._job.address])
        await client.call(0, self._payloads)
        for number in range(self._job.streams):
            await client.call(number, _DelaySink(self._tally, self._delays_ms))

    async def consume(self, work: Work) -> dict[str, Any]:
        self._delays_ms.clear()
        before = self._payloads.num_payloads
        self._tally.expected += work.steps * self._job.streams
        await self._tally.reached()
        percentiles = statistics.quantiles(self._delays_ms, n=100)
        return {
            "p50_ms": percentiles[49],
            "p99_ms": percentiles[98],
            "max_ms": max(self._delays_ms),
            "payloads": self._payloads.num_payloads - before,
        }


async def serve(job: Job) -> BulkServer:
    server = BulkServer(job)
    await server.start()
    return server


async def connect(job: Job) -> BulkClient:
    return BulkClient(job)
