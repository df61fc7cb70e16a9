"""What `mem` does beyond the conformance suite."""

from __future__ import annotations

import asyncio
import random

from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.testing.discovery.observer import observing
from kvolt.testing.virtual.loop import VirtualClock, run_virtual


def test_a_crashed_clients_keys_go_exactly_at_the_ttl() -> None:
    async def main() -> tuple[float, float]:
        store, clock = MemStore(), VirtualClock()
        crashing, reader = (MemDiscovery(store, clock, random.Random(seed)) for seed in (1, 2))
        for key, ttl_s in (("short", 5.0), ("long", 20.0)):
            await crashing.put(key, b"", await crashing.lease(ttl_s))
        await asyncio.sleep(100)
        async with observing(reader, "") as [observer]:
            crashing.abandon()
            await observer.until_content({"long": b""})
            short_at = clock.monotonic()
            await observer.until_content({})
            long_at = clock.monotonic()
        await reader.close()
        return short_at, long_at

    assert run_virtual(main, until_s=600) == (105.0, 120.0)


def test_no_timer_outlives_the_last_client() -> None:
    async def main() -> None:
        store, clock = MemStore(), VirtualClock()
        client = MemDiscovery(store, clock, random.Random(1))
        await client.put("a", b"", await client.lease(1000.0))
        client.abandon()
        late = MemDiscovery(store, clock, random.Random(2))
        assert await late.get_prefix("") == {"a": b""}
        await asyncio.sleep(1001)
        assert await late.get_prefix("") == {}
        await late.put("b", b"", await late.lease(1000.0))
        late.abandon()

    run_virtual(main, until_s=2000)


async def test_only_ones_own_key_can_be_deleted() -> None:
    store = MemStore()
    owner, other = (MemDiscovery(store, VirtualClock(), random.Random(seed)) for seed in (1, 2))
    await owner.put("a", b"", await owner.lease(1.0))
    await other.delete("a")
    assert await other.get_prefix("") == {"a": b""}
    await owner.close()
    await other.close()
