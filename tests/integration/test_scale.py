"""Many streams, many endpoints, large payloads: between two real processes on one connection."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.processes import GENERATE, PATIENCE_S, Bench, until

from kvolt.runtime.address import EndpointAddress

NUM_STREAMS = 10_000
NUM_TOKENS = 30
NUM_ENDPOINTS = 1_000
BULK_BYTES = 10_000_000
NUM_PAYLOADS = 10
DELAY_S = 0.020
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
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.client import Destination
from kvolt.runtime.config import load

{body}

async def main():
    async with running(load(environ=os.environ, cwd=Path.cwd()).settings, "{name}") as process:
        await run(process.runtime)

uvloop.run(main())
"""

READ_MANY = """
async def run(runtime):
    client = await runtime.client(EndpointAddress.parse(sys.argv[3]))
    while not client.candidates():
        await asyncio.sleep(0.05)
    num_streams, num_tokens = int(sys.argv[1]), int(sys.argv[2])

    async def read(number):
        stop = StopConditions(max_tokens=num_tokens)
        request = Request(request_id=RequestId(str(number)), model="sim-tiny", token_ids=(1, 2), stop=stop)
        got = 0
        async with await client.stream(request) as stream:
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
async def run(runtime):
    async def ticks(interval_s):
        number = 0
        while True:
            yield Delta((number,))
            number += 1
            await asyncio.sleep(interval_s)

    async def bulk(num_bytes):
        yield bytes(num_bytes)

    await runtime.serve(EndpointAddress.parse("default.load.ticks"), ticks)
    await runtime.serve(EndpointAddress.parse("default.load.bulk"), bulk)
    await asyncio.sleep(60)
"""

READ_BULK = """
def queued_s():
    # How long the two event loops were ready to run while the machine ran something else.
    files = [Path(f"/proc/{pid}/schedstat") for pid in ("self", sys.argv[3])]
    return sum(int(file.read_text().split()[1]) for file in files if file.exists()) / 1e9

async def run(runtime):
    ticks = await runtime.client(EndpointAddress.parse("default.load.ticks"))
    bulk = await runtime.client(EndpointAddress.parse("default.load.bulk"))
    while not (ticks.candidates() and bulk.candidates()):
        await asyncio.sleep(0.05)
    worst_s = 0.0

    async def read(probe):
        nonlocal worst_s
        async with await ticks.stream(0.002) as stream:
            expected, last = 0, None
            async for delta in stream:
                assert delta.token_ids[0] == expected, (delta, expected)
                expected += len(delta.token_ids)
                if probe:
                    now = time.monotonic() - queued_s()
                    worst_s, last = max(worst_s, now - (last or now)), now

    readers = [asyncio.ensure_future(read(probe=number == 0)) for number in range(8)]
    await asyncio.sleep(0.5)
    trials = []
    for _ in range(int(sys.argv[2])):
        worst_s = 0.0
        await asyncio.sleep(0.3)
        quiet_s, worst_s = worst_s, 0.0
        async with await bulk.stream(int(sys.argv[1])) as stream:
            assert len(await anext(stream)) == int(sys.argv[1])
        await asyncio.sleep(0.05)
        trials.append(worst_s - quiet_s)
    assert not any(reader.done() for reader in readers)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    print(json.dumps({"delays_s": trials, "connections": runtime.plane.gauges().num_open}), flush=True)
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
        speed=3,  # slow enough that the last has come before the first has ended
        max_num_seqs=NUM_STREAMS,
        max_waiting=NUM_STREAMS,
        max_batch_tokens=8 * NUM_STREAMS,
        kv_blocks=4 * NUM_STREAMS,
    )
    reader = bench.start_command(program(READ_MANY, "reader", NUM_STREAMS, NUM_TOKENS, GENERATE), "reader")
    await bench.until_computing(NUM_STREAMS)
    found = await reader.says(r'{"tokens".*}', 2 * PATIENCE_S)
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


async def test_a_large_payload_does_not_delay_deltas(bench: Bench) -> None:
    server = bench.start_command(program(SERVE_BULK, "server"), "server")
    reader = bench.start_command(program(READ_BULK, "reader", BULK_BYTES, NUM_PAYLOADS, server.pid), "reader")
    found = await reader.says(r'{"delays_s".*}')
    result = json.loads(found[0])
    print(result)
    assert result["connections"] == 1
    assert max(result["delays_s"]) < DELAY_S
