"""Conformance suite of the Discovery port, for any implementation.

A case is an async function of a `Harness`, which creates clients of the implementation and breaks its store. With
pytest, on a real loop:

    @pytest.mark.parametrize("case", discovery_suite.CASES, ids=discovery_suite.name) async def
    test_discovery(case):
        await discovery_suite.run_case(case, MyHarness)

and on the virtual loop: `run_virtual(lambda: run_case(case, MyHarness), until_s=600)`.

Must not know any implementation. Timeouts are generous, so that a slow machine fails no case.
"""

from __future__ import annotations

import asyncio

from kvolt.core.errors import DiscoveryLost, InvalidRequest, KeyConflict, NotFound
from kvolt.runtime.discovery.port import LeaseId, Put, Synced
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cases import SOON_S, cases_in, expect, fails, name
from kvolt.testing.discovery.harness import Case, Harness, lasting, leased, run_case
from kvolt.testing.discovery.loss_cases import LOSS_CASES
from kvolt.testing.discovery.observer import Observer, observing

__all__ = ["CASES", "Case", "Harness", "name", "run_case"]


# -- keys and values


async def put_get_overwrite_delete(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    reader = await harness.client()
    expect(await reader.get_prefix("") == {}, "a new store is empty")
    await owner.put("a/b", b"1", lease)
    expect(await owner.get_prefix("a/b") == {"a/b": b"1"}, "a put is seen by its own client")
    expect(await reader.get_prefix("a/b") == {"a/b": b"1"}, "a put is seen by another client")
    await owner.put("a/b", b"2", lease)
    expect(await reader.get_prefix("a/b") == {"a/b": b"2"}, "the second put replaces the value")
    await owner.delete("a/b")
    expect(await reader.get_prefix("a/b") == {}, "a deleted key is gone")
    await owner.delete("a/b")
    await owner.delete("never/there")
    await owner.put("a/b", b"3", lease)
    expect(await reader.get_prefix("a/b") == {"a/b": b"3"}, "a deleted key can be put again")


async def deleted_key_stays_deleted(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("k/gone", b"1", lease)
    await owner.put("k/stays", b"1", lease)
    await owner.delete("k/gone")
    await asyncio.sleep(2 * harness.ttl_s)
    expect(
        await owner.get_prefix("k/") == {"k/stays": b"1"}, "renewing a lease does not restore deleted keys"
    )


async def prefix_and_order(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    keys = ["b", "a/2", "a/10", "a", "a/1", "ab", "A", "a/é"]
    for key in keys:
        await owner.put(key, key.encode(), lease)
    for prefix in ("", "a", "a/", "a/1", "zz"):
        content = await owner.get_prefix(prefix)
        expected = sorted(key for key in keys if key.startswith(prefix))
        expect(list(content) == expected, f"prefix {prefix!r}: {list(content)} is not {expected}")


async def odd_keys(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    keys = [
        ".",
        "..",
        "../..",
        "/",
        "//",
        " ",
        "a b",
        "%2F",
        "a%2Fb",
        "a/b",
        "é/ü",
        "🜁",
        "x\n",
        "@",
        "a.ended",
    ]
    keys += ["k" * 300, "k" * 300 + "/1", "k" * 300 + "/2", "é" * 200]
    for number, key in enumerate(keys):
        await owner.put(key, str(number).encode(), lease)
    content = await (await harness.client()).get_prefix("")
    expect(
        dict(content) == {key: str(number).encode() for number, key in enumerate(keys)},
        "every key is distinct and unchanged",
    )


async def odd_values(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    values = {"v/empty": b"", "v/binary": bytes(range(256)), "v/large": b"\x00\xff" * 512 * 1024}
    for key, value in values.items():
        await owner.put(key, value, lease)
    reader = await harness.client()
    expect(dict(await reader.get_prefix("v/")) == values, "get returns values as they were put")
    async with observing(reader, "v/") as [observer]:
        expect(observer.content == values, "watch returns values as they were put")


# -- watches


async def watch_initial_then_changes(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    for key in ("w/b", "w/a", "other"):
        await owner.put(key, b"0", lease)
    async with observing(await harness.client(), "w/") as [observer]:
        expect(
            observer.events == [Put("w/a", b"0"), Put("w/b", b"0"), Synced()],
            f"the content in key order, then Synced: {observer.events}",
        )
        for value in (b"1", b"2", b"3"):
            await owner.put("w/a", value, lease)
            await observer.until_content({"w/a": value, "w/b": b"0"})
        await owner.delete("w/b")
        await observer.until_content({"w/a": b"3"})
        expect(observer.values("w/a") == [b"0", b"1", b"2", b"3"], "changes come in order")
        expect(observer.events.count(Synced()) == 1, "Synced comes once")
        expect(observer.deletes == ["w/b"], "one Delete")


async def two_watchers(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    client = await harness.client()
    async with observing(client, "t/", "t/1") as [all_of_it, part]:
        for key in ("t/1", "t/2", "t/11"):
            await owner.put(key, b"x", lease)
        await all_of_it.until_content({"t/1": b"x", "t/2": b"x", "t/11": b"x"})
        await part.until_content({"t/1": b"x", "t/11": b"x"})
        async with observing(client, "t/") as [late]:
            await late.until_content(all_of_it.content)
        await owner.delete("t/1")
        await all_of_it.until_content({"t/2": b"x", "t/11": b"x"})
        await part.until_content({"t/11": b"x"})


async def watch_of_nothing_yet(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    async with observing(await harness.client(), "later/") as [observer]:
        expect(observer.events == [Synced()], "an empty prefix is synced at once")
        await owner.put("later/1", b"x", lease)
        await observer.until_content({"later/1": b"x"})


async def slow_reader_gets_the_last_state(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    watch = (await harness.client()).watch_prefix("s/")
    for number in range(50):
        await owner.put("s/a", str(number).encode(), lease)
    await owner.put("s/b", b"x", lease)
    observer, task_group = Observer(), TaskGroup("slow")
    task_group.start(observer.read(watch), "watch")
    try:
        await observer.until_content({"s/a": b"49", "s/b": b"x"})
    finally:
        await task_group.close()


async def close_ends_watches(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    await owner.put("c/1", b"x", lease)
    reader = await harness.client()
    async with observing(reader, "c/") as [observer], observing(owner, "c/") as [own]:
        await owner.close()
        await own.until(lambda: own.ended, "the end of the closed client's watch")
        await observer.until_content({})
        expect(not observer.ended, "another client's watch continues")
        await reader.close()
        await observer.until(lambda: observer.ended, "the end of the watch")
    await reader.close()


# -- leases


async def revoke_deletes_at_once(harness: Harness) -> None:
    owner, lease = await leased(harness)
    kept = await owner.lease(harness.ttl_s)
    await owner.put("r/1", b"x", lease)
    await owner.put("r/2", b"x", lease)
    await owner.put("r/kept", b"x", kept)
    reader = await harness.client()
    async with observing(reader, "r/") as [observer]:
        await owner.revoke(lease)
        expect(await reader.get_prefix("r/") == {"r/kept": b"x"}, "revoked keys are gone when revoke returns")
        await observer.until_content({"r/kept": b"x"})
    await owner.revoke(lease)
    await owner.revoke(LeaseId("no-such-lease"))


async def lease_is_kept_alive(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("l/1", b"x", lease)
    async with observing(await harness.client(), "l/") as [observer]:
        await asyncio.sleep(3 * harness.ttl_s)
        expect(observer.content == {"l/1": b"x"}, "the key of a live owner stays")
        expect(not observer.deletes, "no Delete is reported")


async def crash_expires_after_ttl(harness: Harness) -> None:
    owner, lease = await leased(harness)
    survivor, other = await leased(harness)
    await owner.put("x/dies", b"x", lease)
    await survivor.put("x/lives", b"x", other)
    reader = await harness.client()
    async with observing(reader, "x/") as [observer]:
        await harness.crash(owner)
        await asyncio.sleep(harness.ttl_s / 4)
        expect(not observer.deletes, "no Delete before the ttl")
        await observer.until_content({"x/lives": b"x"})
    expect(await reader.get_prefix("x/") == {"x/lives": b"x"}, "get does not return an expired key")


async def put_over_a_live_lease_is_refused(harness: Harness) -> None:
    first, old = await lasting(harness)
    second, new = await lasting(harness)
    async with observing(await harness.client(), "o/") as [observer]:
        await first.put("o/1", b"first", old)
        sibling = await first.lease(10.0)
        await fails(KeyConflict, second.put("o/1", b"second", new))
        await fails(KeyConflict, first.put("o/1", b"sibling", sibling))
        await second.delete("o/1")
        await second.revoke(old)
        await first.put("o/1", b"still first", old)
        await observer.until_content({"o/1": b"still first"})
        await first.delete("o/1")
        await second.put("o/1", b"second", new)
        await observer.until_content({"o/1": b"second"})
        await second.revoke(new)
        await first.put("o/1", b"first again", old)
        await observer.until_content({"o/1": b"first again"})
        written = [b"still first", b"second", b"first again"]
        seen = [value for value in observer.values("o/1") if value != b"first"]
        expect(seen == written, f"no refused value is visible: {observer.values('o/1')}")


async def key_of_a_crashed_owner_is_free_after_its_ttl(harness: Harness) -> None:
    first, old = await leased(harness)
    second, new = await leased(harness)
    await first.put("o/1", b"first", old)
    await harness.crash(first)
    num_refused = 0
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                await second.put("o/1", b"second", new)
                break
            except KeyConflict:
                num_refused += 1
                await asyncio.sleep(harness.ttl_s / 10)
    expect(num_refused > 0, "the key belongs to the crashed owner's lease until it expires")
    async with observing(await harness.client(), "o/") as [observer]:
        await asyncio.sleep(2 * harness.ttl_s)
        expect(observer.content == {"o/1": b"second"} and not observer.deletes, "the new key stays")


# -- misuse


async def misuse_raises_typed_errors(harness: Harness) -> None:
    owner, lease = await lasting(harness)
    _, others = await lasting(harness)
    for key in ("", "\ud800"):
        await fails(InvalidRequest, owner.put(key, b"", lease))
    await fails(NotFound, owner.put("m/1", b"", others))
    await owner.revoke(lease)
    await fails(NotFound, owner.put("m/1", b"", lease))
    expect(await owner.get_prefix("") == {}, "no refused put is visible")


async def closed_client_raises_lost(harness: Harness) -> None:
    owner, lease = await leased(harness)
    await owner.put("m/1", b"", lease)
    await owner.close()
    await fails(DiscoveryLost, owner.lease(harness.ttl_s))
    await fails(DiscoveryLost, owner.put("m/1", b"", lease))
    await fails(DiscoveryLost, owner.delete("m/1"))
    await fails(DiscoveryLost, owner.get_prefix(""))
    expect([event async for event in owner.watch_prefix("")] == [], "a watch after close ends at once")
    await owner.revoke(lease)
    await owner.close()


CASES: tuple[Case, ...] = (*cases_in(__name__), *LOSS_CASES)
