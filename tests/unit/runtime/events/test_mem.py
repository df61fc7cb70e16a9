from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.runtime.events import subscriber_queue as events_queue
from kvolt.runtime.events.mem import LinkDelay, MemBus, MemEvents
from kvolt.runtime.events.port import Event, EventStream
from kvolt.runtime.events.subscriber_queue import EventCounters, Subscriptions
from kvolt.testing.events_suite import CASES
from kvolt.testing.virtual.loop import run_virtual

MAX_DELAY_S = 0.005


def seeded_delay(seed: int) -> LinkDelay:
    rng = random.Random(seed)
    return lambda _publisher, _subscriber: rng.choice([0.0, rng.uniform(0.0, MAX_DELAY_S)])


class MemHarness:
    def __init__(self, delay_s: LinkDelay | None = None) -> None:
        self._bus = MemBus(delay_s)
        self._num_planes = 0

    async def plane(self) -> MemEvents:
        self._num_planes += 1
        plane = MemEvents(self._bus, f"p{self._num_planes}")
        await plane.start()
        return plane

    async def connected(self, publisher: MemEvents, topic: str, *streams: EventStream) -> None:
        await asyncio.sleep(2 * MAX_DELAY_S)

    def lose(self, publisher: MemEvents, num_events: int) -> None:
        self._bus.drop_next(publisher.publisher, num_events)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("delay_s", [None, seeded_delay(7)], ids=["at_once", "delayed"])
async def test_conformance(case, delay_s):
    await case(MemHarness(delay_s))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("delayed", [False, True], ids=["at_once", "delayed"])
def test_conformance_on_virtual_time(case, delayed):
    async def main() -> None:
        await case(MemHarness(seeded_delay(7) if delayed else None))

    run_virtual(main, until_s=60.0)


class Counted:
    def __init__(self) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self.counters = EventCounters(
            **{name: self._count(name) for name in ("published", "received", "missed", "dropped", "rejected")}
        )

    def _count(self, name):
        def count(label: str, number: int) -> None:
            self.totals[name, label] += number

        return count


async def test_counts_what_is_published_received_missed_and_dropped():
    bus, sent, heard = MemBus(), Counted(), Counted()
    sender, receiver = MemEvents(bus, "a", sent.counters), MemEvents(bus, "b", heard.counters)
    sender.publish("kv", b"not started")
    await sender.start()
    await receiver.start()
    stream = receiver.subscribe("kv")
    sender.publish("kv", b"1")
    bus.drop_next("a", 2)
    for payload in (b"2", b"3", b"4"):
        sender.publish("kv", payload)
    sender.publish("other", b"")
    assert [(await anext(stream)).missed for _ in range(2)] == [0, 2]
    await sender.close()
    sender.publish("kv", b"closed")
    await receiver.close()
    assert sent.totals == {("published", "kv"): 4, ("published", "other"): 1, ("dropped", "kv"): 2}
    assert heard.totals == {("received", "kv"): 2, ("missed", "kv"): 2}


async def test_a_gap_before_start_has_numbers():
    bus = MemBus()
    plane = MemEvents(bus, "a")
    stream = plane.subscribe("kv")
    plane.publish("kv", b"not started")
    await plane.start()
    plane.publish("kv", b"started")
    assert (await anext(stream)).sequence == 2
    await plane.close()


async def test_closed_stream_still_gives_what_was_queued():
    plane = MemEvents(MemBus(), "a")
    await plane.start()
    stream = plane.subscribe("kv")
    plane.publish("kv", b"queued")
    await plane.close()
    assert [event.payload async for event in stream] == [b"queued"]


async def test_aclose_stops_one_stream_only():
    plane = MemEvents(MemBus(), "a")
    await plane.start()
    left, right = plane.subscribe("kv"), plane.subscribe("kv")
    plane.publish("kv", b"one")
    await left.aclose()
    await left.aclose()
    plane.publish("kv", b"two")
    assert [event async for event in left] == []
    assert [(await anext(right)).payload for _ in range(2)] == [b"one", b"two"]
    await plane.close()


async def test_topics_come_and_go_once():
    told: list[str] = []
    subscriptions = Subscriptions(
        EventCounters(), lambda topic: told.append(f"+{topic}"), lambda topic: told.append(f"-{topic}")
    )
    one, two = subscriptions.open("kv", 1), subscriptions.open("kv", 1)
    await one.aclose()
    assert told == ["+kv"]
    await two.aclose()
    assert told == ["+kv", "-kv"]
    assert subscriptions.topics == ()


async def test_repeated_events_are_skipped_and_counted():
    counted = Counted()
    subscriptions = Subscriptions(counted.counters)
    stream = subscriptions.open("kv", 10)
    for sequence in (5, 6, 5, 6, 7):
        subscriptions.deliver(Event("kv", "a", sequence, b""))
    subscriptions.close()
    assert [(event.sequence, event.missed) async for event in stream] == [(5, 0), (6, 0), (7, 0)]
    assert counted.totals["rejected", "repeated"] == 2


async def test_drops_before_the_first_read_are_counted():
    subscriptions = Subscriptions(EventCounters())
    stream = subscriptions.open("kv", 2)
    for sequence in range(50, 60):
        subscriptions.deliver(Event("kv", "a", sequence, b""))
    subscriptions.close()
    assert [(event.sequence, event.missed) async for event in stream] == [(58, 8), (59, 0)]


async def test_forgets_the_publisher_that_was_read_longest_ago(monkeypatch):
    monkeypatch.setattr(events_queue, "_MAX_TRACKED_PUBLISHERS", 2)
    subscriptions = Subscriptions(EventCounters())
    stream = subscriptions.open("kv", 10)

    async def missed(publisher: str, sequence: int) -> int:
        subscriptions.deliver(Event("kv", publisher, sequence, b""))
        return (await anext(stream)).missed

    assert [await missed("a", 1), await missed("b", 1), await missed("a", 3)] == [0, 0, 1]
    assert [await missed("c", 1), await missed("a", 5), await missed("b", 5)] == [0, 1, 0]


async def test_a_long_queue_does_not_hold_up_the_loop():
    subscriptions = Subscriptions(EventCounters())
    stream = subscriptions.open("kv", 1000)
    for sequence in range(1, 1001):
        subscriptions.deliver(Event("kv", "a", sequence, b""))
    subscriptions.close()
    num_read, read_when_the_loop_ran = 0, []
    asyncio.get_running_loop().call_soon(lambda: read_when_the_loop_ran.append(num_read))
    async for _ in stream:
        num_read += 1
    assert num_read == 1000
    assert 0 < read_when_the_loop_ran[0] < 1000


async def test_two_readers_of_one_stream_are_refused():
    stream = Subscriptions(EventCounters()).open("kv", 1)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two concurrent readers"):
        await anext(stream)
    first.cancel()
    await asyncio.wait([first])


def test_a_queue_needs_room():
    with pytest.raises(InvalidRequest):
        Subscriptions(EventCounters()).open("kv", 0)


async def test_one_publisher_id_joins_once():
    bus = MemBus()
    await MemEvents(bus, "a").start()
    with pytest.raises(ConfigError):
        await MemEvents(bus, "a").start()


async def test_delays_keep_each_publishers_order_and_differ_by_link():
    slow = {("a", "near"): 0.0, ("a", "far"): 0.02}
    delays = iter([0.02, 0.0, 0.01, 0.0])
    bus = MemBus(lambda a, b: slow.get((a, b), 0.0) + (next(delays) if b == "far" else 0.0))
    planes = {name: MemEvents(bus, name) for name in ("a", "near", "far")}
    for plane in planes.values():
        await plane.start()
    near, far = planes["near"].subscribe("kv"), planes["far"].subscribe("kv")
    arrived: list[str] = []
    for sequence in range(4):
        planes["a"].publish("kv", bytes([sequence]))

    async def read(name: str, stream: EventStream) -> list[int]:
        payloads = []
        for _ in range(4):
            payloads.append((await anext(stream)).payload[0])
            arrived.append(name)
        return payloads

    assert await asyncio.gather(read("far", far), read("near", near)) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert arrived == ["near"] * 4 + ["far"] * 4
    for plane in planes.values():
        await plane.close()


async def test_a_link_can_lose_what_another_delivers():
    cut = {("a", "b")}
    bus = MemBus(lambda publisher, subscriber: None if (publisher, subscriber) in cut else 0.0)
    planes = [MemEvents(bus, name) for name in "abc"]
    for plane in planes:
        await plane.start()
    b, c = planes[1].subscribe("kv"), planes[2].subscribe("kv")
    cut.clear()
    planes[0].publish("kv", b"1")
    assert [(await anext(b)).missed, (await anext(c)).missed] == [0, 0]
    cut.add(("a", "b"))
    planes[0].publish("kv", b"2")
    cut.clear()
    planes[0].publish("kv", b"3")
    assert (await anext(b)).missed == 1
    assert [(await anext(c)).missed for _ in range(2)] == [0, 0]
    for plane in planes:
        await plane.close()


async def test_closing_cuts_what_is_on_its_way_to_the_closed_plane_only():
    bus = MemBus(lambda _publisher, _subscriber: 0.01)
    sender, leaver, stayer = (MemEvents(bus, name) for name in ("a", "b", "c"))
    for plane in (sender, leaver, stayer):
        await plane.start()
    gone, kept = leaver.subscribe("kv"), stayer.subscribe("kv")
    sender.publish("kv", b"on its way")
    await leaver.close()
    await sender.close()
    assert (await anext(kept)).payload == b"on its way"
    assert [event async for event in gone] == []
    await stayer.close()
