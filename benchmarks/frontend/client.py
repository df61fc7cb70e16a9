"""Load generator: a client that requests streamed chat completions and counts events and reads.

Used instead of wrk because it ends with the last answer: wrk aborts running answers, whose CPU is then counted and
whose tokens are not (with 512 connections that is most of the run). Requests are encoded before the measurement; a
read costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from benchmarks.frontend.edges import Edge
from benchmarks.frontend.prompts import chat_body
from benchmarks.harness import BrokenRun

_OK = b"HTTP/1.1 200"
_EVENT = b"data: "
_LAST_EVENT = b"data: [DONE]"
_END = b"0\r\n\r\n"
_SETTLE_S = 0.5

WAIT_S = 120.0
"""No wait for answers is longer."""


@dataclass(slots=True)
class Tally:
    """Counts over all connections of a load."""

    events: int = 0
    """Without `[DONE]`."""
    reads: int = 0
    num_bytes: int = 0
    responses: int = 0


_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
"""Resolution of the CPU times of other processes."""


class Connection(asyncio.Protocol):
    """A kept-alive connection with one request at a time under way."""

    def __init__(self, tally: Tally, fail: Callable[[BrokenRun], None]) -> None:
        self._tally = tally
        self._fail = fail
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._has_started = False
        self._last_seen = False
        self._closing = False
        self.events = 0
        """Events of all responses so far."""
        self.on_read: Callable[[bytes], None] | None = None
        self.on_end: Callable[[Connection], None] = lambda _: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is not one by name

    def ask(self, request: bytes) -> None:
        assert self._transport is not None
        self._tail = b""
        self._has_started = self._last_seen = False
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._has_started:
            if not data.startswith(_OK):
                self._fail(BrokenRun(f"a request was refused:\n{data[:1000].decode(errors='replace')}"))
                return
            self._has_started = True
        if self.on_read is not None:
            self.on_read(data)
        tally, tail = self._tally, self._tail
        joined = tail + data
        count = joined.count(_EVENT) - tail.count(_EVENT)
        if not self._last_seen and _LAST_EVENT in joined:
            self._last_seen = True
            count -= 1
        self.events += count
        tally.events += count
        tally.reads += 1
        tally.num_bytes += len(data)
        self._tail = joined[-16:]
        if self._last_seen and joined.endswith(_END):
            tally.responses += 1
            self.on_end(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closing:
            self._fail(BrokenRun(f"the edge hung up: {error}"))

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()


class Load:
    """Open connections to an edge; a context, at whose end they are closed."""

    def __init__(self, edge: Edge, num_connections: int) -> None:
        self._edge = edge
        self._num_connections = num_connections
        self.tally = Tally()
        self.connections: list[Connection] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Load:
        loop = asyncio.get_running_loop()
        for _ in range(self._num_connections):
            _, connection = await loop.create_connection(
                lambda: Connection(self.tally, self._fail), "127.0.0.1", self._edge.port, ssl=self._edge.tls
            )
            self.connections.append(connection)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()
        self._ended.cancel()

    def end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def ended(self, timeout_s: float = WAIT_S) -> None:
        """Until `end` is called; BrokenRun if a connection fails before."""
        done, _ = await asyncio.wait([self._ended], timeout=timeout_s)
        if not done:
            raise BrokenRun(f"answers did not end within {timeout_s:.0f} s: {self.tally}")
        self._ended.result()

    async def sleep(self, seconds: float) -> None:
        """Sleep; BrokenRun if a connection fails."""
        done, _ = await asyncio.wait([self._ended], timeout=seconds)
        if done:
            self._ended.result()
            raise BrokenRun("the answers ended early: the mock is faster than configured")

    def _fail(self, error: BrokenRun) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)


class Measured(msgspec.Struct, frozen=True):
    """Duration and counts of a load."""

    wall_s: float
    edge_cpu_s: float
    mock_cpu_s: float
    client_cpu_s: float
    responses: int
    events: int
    reads: int
    num_bytes: int


def _window(edge: Edge, tally: Tally) -> Callable[[], Measured]:
    """Starts to measure; the result ends it."""

    def read() -> tuple[float, ...]:
        counts = tally.responses, tally.events, tally.reads, tally.num_bytes
        return time.monotonic(), edge.meter.cpu_s(), edge.mock_meter.cpu_s(), time.process_time(), *counts

    before = read()

    def end() -> Measured:
        used = [after - start for after, start in zip(read(), before, strict=True)]
        used[1] = max(used[1], _TICK_S)  # a short run may take none, and is divided by
        return msgspec.convert(
            dict(zip(Measured.__struct_fields__, used, strict=True)), Measured, strict=False
        )

    return end


async def closed_load(edge: Edge, requests: Sequence[Sequence[bytes]]) -> Measured:
    """Send each list of requests over its own connection, one after another, until all are answered."""
    left = [iter(each) for each in requests]
    open_count = len(requests)

    async with Load(edge, len(requests)) as load:

        def following(number: int) -> Callable[[Connection], None]:
            def ask_next(connection: Connection) -> None:
                nonlocal open_count
                request = next(left[number], None)
                if request is not None:
                    connection.ask(request)
                    return
                open_count -= 1
                if not open_count:
                    load.end()

            return ask_next

        end = _window(edge, load.tally)
        for number, connection in enumerate(load.connections):
            connection.on_end = following(number)
            connection.on_end(connection)
        await load.ended()
        return end()


async def steady_load(edge: Edge, requests: Sequence[bytes], seconds: float) -> Measured:
    """All streams at once, measured while all are under way: neither requests nor ends are in the window."""
    async with Load(edge, len(requests)) as load:
        for connection, request in zip(load.connections, requests, strict=True):
            connection.on_end = lambda _: load.end()
            connection.ask(request)
        deadline = time.monotonic() + WAIT_S
        while min(connection.events for connection in load.connections) < 2:
            await load.sleep(0.05)
            if time.monotonic() > deadline:
                raise BrokenRun(f"some streams have not started after {WAIT_S:.0f} s")
        await load.sleep(_SETTLE_S)
        end = _window(edge, load.tally)
        await load.sleep(seconds)
        return end()


class Shape(msgspec.Struct, frozen=True):
    """Events of a stream per token."""

    events_per_token: float
    """Events that have text in them."""
    other_events: int
    """Those without, per answer: a role, a finish reason."""


def shape_of_stream(edge: Edge, num_tokens: int = 512) -> Shape:
    """Read by a plain HTTP client, parsed as JSON."""
    body = chat_body([{"role": "user", "content": "count the events"}], num_tokens)
    address = f"{'https' if edge.tls else 'http'}://127.0.0.1:{edge.port}/v1/chat/completions"
    headers = {"Content-Type": "application/json", **edge.headers}
    http_request = urllib.request.Request(address, body, headers)
    with urllib.request.urlopen(http_request, timeout=WAIT_S, context=edge.tls) as response:
        lines = response.read().split(b"\n")
    chunks = [json.loads(line[len(_EVENT) :]) for line in lines if line.startswith(b"data: {")]
    num_content = sum(
        1 for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")
    )
    return Shape(num_content / num_tokens, len(chunks) - num_content)
