"""`file` discovery between real processes."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.testing.discovery.observer import observing

TTL_S = 1.2

OWNER = """
import asyncio, random, sys
from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.discovery.file import FileDiscovery

async def main(directory, name, ttl_s, num_keys):
    client = FileDiscovery(directory, SystemClock(), ThreadBlocking(), random.Random(), 0.05)
    lease = await client.lease(ttl_s)
    for number in range(num_keys):
        await client.put(f"{name}/{number}", b"0", lease)
    print("ready", flush=True)
    beat = 0
    while True:
        beat += 1
        try:
            await client.put(f"{name}/beat", str(beat).encode(), lease)
        except DiscoveryLost:
            pass
        await asyncio.sleep(0.02)

asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
"""


@asynccontextmanager
async def owner(directory: Path, name: str, num_keys: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        str(directory),
        name,
        str(TTL_S),
        str(num_keys),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def reader(directory: Path) -> AsyncIterator[FileDiscovery]:
    blocking = ThreadBlocking()
    client = FileDiscovery(directory, SystemClock(), blocking, random.Random(), 0.05)
    try:
        yield client
    finally:
        await client.close()
        blocking.close()


async def test_a_killed_process_is_seen_by_another(tmp_path: Path) -> None:
    async with (
        owner(tmp_path, "dies", 3) as dies,
        owner(tmp_path, "lives", 3),
        reader(tmp_path) as client,
        observing(client, "dies/", "lives/") as [dying, living],
    ):
        assert {f"dies/{number}" for number in range(3)} <= dying.content.keys()
        dies.send_signal(signal.SIGKILL)
        await dying.until_content({})
        assert not living.deletes
        seen = living.content["lives/beat"]
        await living.until(lambda: living.content["lives/beat"] != seen, "the survivor's next beat")


async def test_a_directory_removed_under_load_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "discovery"
    async with (
        owner(directory, "a", 50),
        owner(directory, "b", 50),
        reader(directory) as client,
        observing(client, "") as [observer],
    ):
        shutil.rmtree(directory, ignore_errors=True)
        await asyncio.sleep(1.5 * TTL_S)
        assert not observer.deletes
        seen = dict(observer.content)
        await observer.until(
            lambda: all(observer.content[key] != seen[key] for key in ("a/beat", "b/beat")), "new beats"
        )
        async with reader(directory) as newcomer:
            found = await newcomer.get_prefix("")
        assert found.keys() == seen.keys()
        assert len(found) == 102
