"""Many streams, many endpoints, large payloads: between two real processes on one connection."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.processes import GENERATE, PATIENCE_S, Bench, until

from kvolt.core.endpoints import EndpointAddress

NUM_STREAMS = 10_000
NUM_TOKENS = 30
NUM_ENDPOINTS = 1_000
BULK_BYTES = 32_000_000
NUM_PAYLOADS = 10
GIB = 1024**3


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


# What the other processes run: `settings`, then one of the bodies.
FRAME = """
import asyncio, json, os, sys, time
from pathlib import Path
import uvloop
from kvolt.cli.process import running
from kvolt.core.delta import Delta
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.core.endpoints import EndpointAddress
from kvolt.runtime.endpoint.client import Destination
from kvolt.runtime.config.loader import load
from kvolt.runtime.security.identity import ProcessRole

{body}

async def main():
    async with running(load(environ=os.environ, cwd=Path.cwd()).settings, "{name}", ProcessRole.FRONTEND) as process:
        await run(process.runtime)

uvloop.run(main())
"""

READ_MANY = """
async def run(runtime):
    client = await runtime.client(EndpointAddress.parse(sys.argv[3]))
    while not client.candidates():
        await asyncio.sleep(0.05)
    num_streams, num_tokens = int(sys.argv[1]), int(sys.argv[2])

    all_open = asyncio.Barrier(num_streams)

    async def read(number):
        stop = StopConditions(max_tokens=num_tokens)
        request = Request(request_id=RequestId(str(number)), model="sim-tiny", token_ids=(1, 2), stop=stop)
        got = 0
        async with await client.stream(request) as stream:
            await all_open.wait()
            async for delta in stream:
                got += len(delta.token_ids)
        return got

    started = time.monotonic()
    got = await asyncio.gather(*(read(number) for number in range(num_streams)))
    result = {"tokens": sorted(set(got)), "connections": runtime.plane.gauges().num_open}
    print(json.dumps({**result, "seconds": time.monotonic() - started}), flush=True)
    await asyncio.sleep(60)
"""

SERVE_MANY = """
async def run(runtime):
    async def echo(request):
        yield request

    for number in range(int(sys.argv[1])):
        await runtime.serve(EndpointAddress("default", f"many-{number}", "echo"), echo)
    print("registered", flush=True)
    await asyncio.sleep(60)
"""

SERVE_BULK = """
num_ticks = 0

async def run(runtime):
    async def ticks(interval_s):
        global num_ticks
        while True:
            yield Delta((num_ticks,))
            num_ticks += 1
            await asyncio.sleep(interval_s)

    async def bulk(num_bytes):
        yield num_ticks.to_bytes(8, "little") + bytes(num_bytes)

    await runtime.serve(EndpointAddress.parse("default.load.ticks"), ticks)
    await runtime.serve(EndpointAddress.parse("default.load.bulk"), bulk)
    await asyncio.sleep(60)
"""

READ_BULK = """
async def run(runtime):
    ticks = await runtime.client(EndpointAddress.parse("default.load.ticks"))
    bulk = await runtime.client(EndpointAddress.parse("default.load.bulk"))
    while not (ticks.candidates() and bulk.candidates()):
        await asyncio.sleep(0.05)
    num_read = 0

    async def read():
        nonlocal num_read
        async with await ticks.stream(0.001) as stream:
            async for delta in stream:
                assert delta.token_ids[0] == num_read, (delta, num_read)
                num_read += len(delta.token_ids)

    reader = asyncio.ensure_future(read())
    overtaken = []
    for _ in range(int(sys.argv[2])):
        async with await bulk.stream(int(sys.argv[1])) as stream:
            payload = await anext(stream)
        # Deltas sent after it that were here before it.
        overtaken.append(num_read - int.from_bytes(payload[:8], "little"))
        assert len(payload) == 8 + int(sys.argv[1])
    assert not reader.done()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    print(json.dumps({"overtaken": overtaken, "connections": runtime.plane.gauges().num_open}), flush=True)
"""


def program(body: str, name: str, *arguments: object) -> list[str]:
    text = FRAME.format(body=body, name=name)
    return [sys.executable, "-c", text, *map(str, arguments)]


def peak_rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process(pid).memory_info().rss


async def test_ten_thousand_streams_on_one_connection(bench: Bench) -> None:
    worker = bench.worker(
        "worker",
        speed=1,  # slow enough that it computes all of them at once, on a machine that is not too busy
        max_num_seqs=NUM_STREAMS,
        max_waiting=NUM_STREAMS,
        max_batch_tokens=8 * NUM_STREAMS,
        kv_blocks=4 * NUM_STREAMS,
    )
    # The reader starts ten thousand tasks before it looks whether it is connected.
    bench.env["KVOLT_PLANE_CONNECT_TIMEOUT_S"] = "60"
    reader = bench.start_command(program(READ_MANY, "reader", NUM_STREAMS, NUM_TOKENS, GENERATE), "reader")
    found = await reader.says(r'{"tokens".*}', 4 * PATIENCE_S)
    result = json.loads(found[0])
    peaks = {"worker": peak_rss_bytes(worker.pid), "reader": peak_rss_bytes(reader.pid)}
    print(f"peak RSS {peaks}, {result['seconds']:.1f} s")
    assert result["tokens"] == [NUM_TOKENS]
    assert result["connections"] == 1
    assert sum(peaks.values()) < GIB


async def test_a_thousand_endpoints(bench: Bench) -> None:
    server = bench.start_command(program(SERVE_MANY, "server", NUM_ENDPOINTS), "server")
    async with bench.runtime() as runtime:
        clients = [
            await runtime.client(EndpointAddress("default", f"many-{number}", "echo"))
            for number in range(NUM_ENDPOINTS)
        ]
        await server.says("registered")
        await until(lambda: all(client.candidates() for client in clients), what="all endpoints")

        async def ask(number: int) -> int:
            async with await clients[number].stream(number) as stream:
                answer: int = await anext(stream)
                return answer

        numbers = range(0, NUM_ENDPOINTS, 10)
        assert await asyncio.gather(*(ask(number) for number in numbers)) == list(numbers)
        server.kill()
        await until(lambda: not any(client.candidates() for client in clients), what="all to be gone")


async def test_deltas_overtake_a_large_payload(bench: Bench) -> None:
    """How long they wait behind it is measured by `benchmarks.runtime.plane --bulk`."""
    server = bench.start_command(program(SERVE_BULK, "server"), "server")
    reader = bench.start_command(program(READ_BULK, "reader", BULK_BYTES, NUM_PAYLOADS), "reader")
    found = await reader.says(r'{"overtaken".*}')
    assert server.exit_code is None
    result = json.loads(found[0])
    print(result)
    assert result["connections"] == 1
    assert statistics.median(result["overtaken"]) >= 5
