"""The zmq event plane between real processes that find each other through a directory."""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.runtime.events.port import Event
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import ZmqOptions

ECHO = """
import asyncio, random, sys
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import ZmqOptions
from kvolt.runtime.tasks import Scope

async def main():
    blocking, rng = ThreadBlocking(), random.Random()
    discovery = FileDiscovery(sys.argv[1], SystemClock(), blocking, rng, poll_s=0.02)
    events = ZmqEvents(ZmqOptions(namespace="ns", lease_ttl_s=4.0), new_id(rng), discovery)
    pings = events.subscribe("ping")
    await events.start()
    print(events.publisher, flush=True)

    async def echo():
        async for ping in pings:
            events.publish("pong", ping.payload)

    async with Scope("echo") as scope:
        scope.start(echo(), "echo")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await events.close()
    await discovery.close()
    blocking.close()

asyncio.run(main())
"""


@asynccontextmanager
async def echo_process(directory: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        ECHO,
        str(directory),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def first_pong(events: ZmqEvents, pongs, publisher: str) -> Event:
    """Ping until this publisher answers."""
    while True:
        events.publish("ping", b"")
        try:
            async with asyncio.timeout(0.05):
                pong = await anext(pongs)
        except TimeoutError:
            continue
        if pong.publisher == publisher:
            return pong


async def echoes_in_order(events: ZmqEvents, pongs, num_events: int) -> bool:
    sent = [str(number).encode() for number in range(1, num_events + 1)]
    for payload in sent:
        events.publish("ping", payload)
    heard = []
    while len(heard) < num_events:
        pong = await anext(pongs)
        assert pong.missed == 0
        if pong.payload:
            heard.append(pong.payload)
    return heard == sent


async def test_echo_crash_restart_and_leave(tmp_path):
    blocking, rng = ThreadBlocking(), random.Random(1)
    discovery = FileDiscovery(tmp_path, SystemClock(), blocking, rng, poll_s=0.02)
    events = ZmqEvents(ZmqOptions(namespace="ns"), new_id(rng), discovery)
    pongs = events.subscribe("pong")
    await events.start()

    async def others() -> list[str]:
        keys = await discovery.get_prefix("events/ns/")
        return [name for key in keys if (name := key.removeprefix("events/ns/")) != events.publisher]

    try:
        async with echo_process(tmp_path) as (process, first):
            assert (await first_pong(events, pongs, first)).missed == 0
            assert await echoes_in_order(events, pongs, 500)
            process.kill()
            await process.wait()

        async with echo_process(tmp_path) as (process, second):
            assert second != first
            assert (await first_pong(events, pongs, second)).missed == 0
            assert await echoes_in_order(events, pongs, 500)
            for _ in range(200):
                if await others() == [second]:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("the killed process is still registered")
            assert await echoes_in_order(events, pongs, 10)
            process.stdin.close()
            assert await process.wait() == 0

        assert await others() == []
    finally:
        await events.close()
        await discovery.close()
        blocking.close()
