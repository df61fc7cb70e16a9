"""Cases of the request plane's suite: stalled peers, which are silent while their connections stay open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvolt.core.errors import KvoltError, WorkerLost
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.testing.cases import cases_in, expect, fails
from kvolt.testing.plane.harness import (
    ENDPOINT,
    Case,
    Harness,
    Probe,
    answers,
    client_of,
    collect,
    served,
    until,
)

_PATIENT = Deadlines(between_s=60.0, stall_s=60.0)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def silent_peer_is_lost_after_grace(harness: Harness) -> None:
    """A permanent silent cut: the streams end on both sides."""
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(1, deadlines=_PATIENT)
        expect(await anext(stream) == 0, "it runs")
        began = _now()
        await harness.isolate("server")
        await fails(WorkerLost, anext(stream))
        waited_s = _now() - began
        expect(waited_s > harness.dead_after_s, f"not before a stall is possible: {waited_s:g} s")
        expect(waited_s < harness.stall_grace_s + 2, f"not longer than the grace: {waited_s:g} s")
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def stalled_server_keeps_its_streams(harness: Harness) -> None:
    """A silent instance is no candidate; it returns as soon as it responds."""
    async with served(harness, _ticks) as (_, _, client):
        stream = await client.stream(20, deadlines=_PATIENT)
        expect(await anext(stream) == 0, "it runs")
        await harness.stall("server")
        await until(lambda: client.candidates() == [], "the instance leaves the candidates")
        expect(len(client.recovering()) == 1, "the instance counts as recovering")
        await asyncio.sleep(_most_of_the_grace(harness))
        await harness.end_stall("server")
        expect(await collect(stream) == list(range(1, 20)), "nothing is lost or repeated")
        await until(lambda: len(client.candidates()) == 1, "the instance is back")
        expect(client.recovering() == frozenset(), "no instance is recovering")
        expect(await answers(client, 2) == [0, 1], "it responds again")


async def stalled_caller_keeps_its_streams(harness: Harness) -> None:
    async with served(harness, _ticks) as (server, _, client):
        stream = await client.stream(20, deadlines=_PATIENT)
        expect(await anext(stream) == 0, "it runs")
        await harness.stall("caller")
        await asyncio.sleep(harness.dead_after_s + _most_of_the_grace(harness))
        await harness.end_stall("caller")
        expect(await collect(stream) == list(range(1, 20)), "nothing is lost or repeated")
        await until(lambda: server.server.num_active == 0, "the end of the handler")


async def calls_to_silent_peer_end_if_another_instance_is_reachable(harness: Harness) -> None:
    probe = Probe()
    for name in ("first", "second"):
        await (await harness.runtime(name)).serve(ENDPOINT, probe.forever, int)
    client = await client_of(await harness.runtime("caller"), num_instances=2)
    sinks = [_Ends() for _ in range(2)]
    calls = [await client.call(1, sink, deadlines=_PATIENT) for sink in sinks]
    await until(lambda: probe.num_sent == 2, "one stream on each instance")
    began = _now()
    await harness.stall("first")
    await until(lambda: any(sink.ends for sink in sinks), "the end of the calls to it")
    expect(_now() - began > harness.dead_after_s / 2, "a short silence is no loss")
    expect(_now() - began < harness.dead_after_s + 4, "it does not wait for the grace")
    expect(sorted(len(sink.ends) for sink in sinks) == [0, 1], "the other call continues")
    expect([type(end) for sink in sinks for end in sink.ends] == [WorkerLost], "a retry is possible")
    expect(len(client.candidates()) == 1, "the silent instance is no candidate")
    async with await client.stream(1) as stream:
        expect(await anext(stream) == 0, "the other instance responds")
    await harness.end_stall("first")
    await until(lambda: len(client.candidates()) == 2, "the silent instance is back")
    for call in calls:
        call.cancel()


async def two_silent_peers_keep_their_streams(harness: Harness) -> None:
    """Instances that stall together, as on one machine, do not count as each other's replacement."""
    names = ("first", "second")
    for name in names:
        await (await harness.runtime(name)).serve(ENDPOINT, _ticks, int)
    client = await client_of(await harness.runtime("caller"), num_instances=2)
    streams = [await client.stream(20, deadlines=_PATIENT) for _ in range(4)]
    for stream in streams:
        expect(await anext(stream) == 0, "it runs")
    for name in names:
        await harness.stall(name)
    await until(lambda: client.candidates() == [], "both leave the candidates")
    await asyncio.sleep(_most_of_the_grace(harness))
    for name in names:
        await harness.end_stall(name)
    for stream in streams:
        expect(await collect(stream) == list(range(1, 20)), "nothing is lost or repeated")


async def _ticks(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value
        await asyncio.sleep(0.02)


class _Ends:
    """Sink that collects ends."""

    def __init__(self) -> None:
        self.ends: list[KvoltError | None] = []

    def on_item(self, item: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)


def _most_of_the_grace(harness: Harness) -> float:
    """Half of the grace after a peer is known to be silent."""
    return (harness.stall_grace_s - harness.dead_after_s) / 2


CASES: tuple[Case, ...] = cases_in(__name__)
