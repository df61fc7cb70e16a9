"""Cases of the Discovery suite in which the store is unreachable, emptied, or both.

Losing the store must not change what clients know of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cases import SOON_S, cases_in, expect
from kvolt.testing.discovery.harness import Case, Harness, leased
from kvolt.testing.discovery.observer import Observer, observing

_RETRY_S = 0.05


async def eventually(action: Callable[[], Awaitable[None]]) -> None:
    """Retry an action while the store is lost, as a caller of the port would."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await action()
            except DiscoveryLost:
                await asyncio.sleep(_RETRY_S)


async def loss_deletes_nothing(harness: Harness) -> None:
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
        expect(observer.content == {"n/1": b"1"} and not observer.deletes, "a watch keeps the last state")
        await harness.set_reachable(True)
        if refused:
            await eventually(lambda: owner.put("n/2", b"2", lease))
        await observer.until_content({"n/1": b"1", "n/2": b"2"})
        await asyncio.sleep(2 * harness.ttl_s)
        expect(not observer.deletes, f"reconnecting deletes nothing: {observer.deletes}")


async def refused_changes_are_undone(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/old", b"1", lease)
    await owner.put("n/deleted", b"1", lease)
    await harness.set_reachable(False)
    expected = {"n/old": b"1"}
    for key in ("n/old", "n/new"):
        with suppress(DiscoveryLost):
            await owner.put(key, b"2", lease)
            expected[key] = b"2"
    with suppress(DiscoveryLost):
        await owner.delete("n/deleted")
    await harness.set_reachable(True)
    async with observing(await harness.client(), "n/") as [observer]:
        await observer.until_content(expected)
        await asyncio.sleep(2 * harness.ttl_s)
        expect(observer.content == expected, f"refused changes are not applied: {observer.content}")


async def watch_started_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    reader = await harness.client()
    await harness.set_reachable(False)
    observer, task_group = Observer(), TaskGroup("early")
    task_group.start(observer.read(reader.watch_prefix("n/")), "watch")
    try:
        await asyncio.sleep(harness.ttl_s)
        expect(observer.events == [], "an unreachable store yields no events")
        await harness.set_reachable(True)
        await observer.until_content({"n/1": b"1"})
    finally:
        await task_group.close()


async def crash_while_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("n/1", b"1", lease)
    async with observing(await harness.client(), "n/") as [observer]:
        await harness.set_reachable(False)
        await harness.crash(owner)
        await asyncio.sleep(2 * harness.ttl_s)
        expect(not observer.deletes, "no key is deleted while the store is lost")
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
            expect(observer.content == content, "a watcher sees no change")
    # Owners put their keys back at their next renewal, which may be late on a slow machine.
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
        expect(
            observer.content == {"p/1": b"1"} and not observer.deletes, "the key is restored without an event"
        )
    expect(dict(await (await harness.client()).get_prefix("p/")) == {"p/1": b"1"}, "the key is in the store")


async def crash_before_wipe(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("p/1", b"1", lease)
    async with observing(await harness.client(), "p/") as [observer]:
        await harness.crash(owner)
        await harness.wipe()
        await observer.until_content({})


LOSS_CASES: tuple[Case, ...] = cases_in(__name__)
