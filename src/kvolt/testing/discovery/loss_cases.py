"""Cases of the Discovery suite in which the store is lost, emptied, or both.

What they have in common: losing the store is no news about the cluster. Must not know any implementation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.tasks import Crew
from kvolt.testing.discovery.harness import Case, Harness, leased
from kvolt.testing.discovery.observer import SOON_S, Observer, expect, observing

_RETRY_S = 0.05


async def eventually(action: Callable[[], Awaitable[None]]) -> None:
    """Retry what a lost store refuses, as a caller of the port would."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await action()
            except DiscoveryLost:
                await asyncio.sleep(_RETRY_S)


async def loss_is_no_news(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    async with observing(await harness.client(), "n/") as [observer]:
        await harness.set_reachable(False)
        refused = False
        try:
            await owner.put("n/2", b"2", lease)
        except DiscoveryLost:
            refused = True
        await asyncio.sleep(2 * harness.ttl_s)
        expect(not observer.ended, "a watch survives the loss")
        expect(observer.content == {"n/1": b"1"} and not observer.deletes, "and keeps the last state")
        await harness.set_reachable(True)
        if refused:
            await eventually(lambda: owner.put("n/2", b"2", lease))
        await observer.until_content({"n/1": b"1", "n/2": b"2"})
        await asyncio.sleep(2 * harness.ttl_s)
        expect(not observer.deletes, f"coming back deletes nothing: {observer.deletes}")


async def refused_changes_are_undone(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/old", b"1", lease)
    await owner.put("n/deleted", b"1", lease)
    await harness.set_reachable(False)
    wanted = {"n/old": b"1"}
    for key in ("n/old", "n/new"):
        with suppress(DiscoveryLost):
            await owner.put(key, b"2", lease)
            wanted[key] = b"2"
    with suppress(DiscoveryLost):
        await owner.delete("n/deleted")
    await harness.set_reachable(True)
    async with observing(await harness.client(), "n/") as [observer]:
        await observer.until_content(wanted)
        await asyncio.sleep(2 * harness.ttl_s)
        expect(observer.content == wanted, f"what was refused has not happened: {observer.content}")


async def watch_begun_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    reader = await harness.client()
    await harness.set_reachable(False)
    observer, crew = Observer(), Crew("early")
    crew.start(observer.read(reader.watch_prefix("n/")), "watch")
    try:
        await asyncio.sleep(harness.ttl_s)
        expect(observer.events == [], "nothing is said of a store that cannot be read")
        await harness.set_reachable(True)
        await observer.until_content({"n/1": b"1"})
    finally:
        await crew.close()


async def crash_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    async with observing(await harness.client(), "n/") as [observer]:
        await harness.set_reachable(False)
        await harness.crash(owner)
        await asyncio.sleep(2 * harness.ttl_s)
        expect(not observer.deletes, "who died cannot be known while the store is lost")
        await harness.set_reachable(True)
        await observer.until_content({})


async def revoke_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    async with observing(await harness.client(), "n/") as [observer]:
        await harness.set_reachable(False)
        with suppress(DiscoveryLost):
            await owner.revoke(lease)
        await harness.set_reachable(True)
        await observer.until_content({})


async def close_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    async with observing(owner, "n/") as [own]:
        await harness.set_reachable(False)
        await owner.close()
        await own.until(lambda: own.ended, "the end of the watch")
    await harness.set_reachable(True)


async def wipe_is_put_back(harness: Harness) -> None:
    owners = [await leased(harness) for _ in range(3)]
    content = {}
    for number, (owner, lease) in enumerate(owners):
        content[f"p/{number}"] = str(number).encode()
        await owner.put(f"p/{number}", content[f"p/{number}"], lease)
    reader = await harness.client()
    async with observing(reader, "p/") as [observer]:
        for _ in range(2):
            await harness.wipe()
            await asyncio.sleep(2 * harness.ttl_s)
            expect(not observer.deletes, f"a watcher sees no Delete: {observer.deletes}")
            expect(observer.content == content, "nor a change")
    # Owners put their keys back when they next renew; a slow machine may have kept one of them from it.
    async with observing(await harness.client(), "p/") as [newcomer]:
        await newcomer.until_content(content)


async def wipe_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("p/1", b"1", lease)
    async with observing(await harness.client(), "p/") as [observer]:
        await harness.set_reachable(False)
        await harness.wipe()
        await asyncio.sleep(2 * harness.ttl_s)
        await harness.set_reachable(True)
        await asyncio.sleep(2 * harness.ttl_s)
        expect(observer.content == {"p/1": b"1"} and not observer.deletes, "the key was put back unseen")
    expect(dict(await (await harness.client()).get_prefix("p/")) == {"p/1": b"1"}, "and is really there")


async def crash_before_wipe(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("p/1", b"1", lease)
    async with observing(await harness.client(), "p/") as [observer]:
        await harness.crash(owner)
        await harness.wipe()
        await observer.until_content({})


LOSS_CASES: tuple[Case, ...] = (
    loss_is_no_news,
    refused_changes_are_undone,
    watch_begun_while_lost,
    crash_while_lost,
    revoke_while_lost,
    close_while_lost,
    wipe_is_put_back,
    wipe_while_lost,
    crash_before_wipe,
)
