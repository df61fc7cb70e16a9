"""Conformance suite of the request plane, second part: deadlines, lost and stalled peers, shutdown.

Run it as `plane_suite`: the same Harness, the same `run_case`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from kvolt.core.endpoints import InstanceState
from kvolt.core.errors import Cancelled, ConnectFailed, DeadlineExceeded, KvoltError, Unavailable, WorkerLost
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import Scope, TaskGroup
from kvolt.testing.cases import SOON_S, cases_in, expect, fails
from kvolt.testing.plane import stall_cases as plane_stall_cases
from kvolt.testing.plane.harness import (
    ENDPOINT,
    Case,
    Harness,
    Probe,
    answers,
    client_of,
    collect,
    count_to,
    served,
    until,
)

_SHORT_S = 0.15


def _now() -> float:
    return asyncio.get_running_loop().time()


# -- deadlines


async def connect_deadline(harness: Harness) -> None:
    """Nothing was sent, so the call may be retried elsewhere: ConnectFailed, and the instance is no candidate."""
    async with served(harness, count_to) as (_, _, client):
        await harness.isolate("server")
        began = _now()
        error = await fails(ConnectFailed, client.stream(1, deadlines=Deadlines(connect_s=_SHORT_S)))
        expect(error.retryable, "a retry on another instance is possible")
        expect(_now() - began < SOON_S / 2, "it waits for nothing else")
        expect(client.candidates() == [], "the instance leaves the candidates at once")


async def total_deadline_while_connecting(harness: Harness) -> None:
    """An expired total deadline says nothing about the instance."""
    async with served(harness, count_to) as (_, _, client):
        await harness.isolate("server")
        error = await fails(DeadlineExceeded, client.stream(1, deadlines=Deadlines(total_s=_SHORT_S)))
        expect(error.fields.get("stage") == "total", f"{error!r}")
        expect(len(client.candidates()) == 1, "the instance stays a candidate")


async def first_deadline(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(0, deadlines=Deadlines(first_s=_SHORT_S))
        error = await fails(DeadlineExceeded, anext(stream))
        expect(error.fields == {"stage": "first", "after_s": _SHORT_S}, f"{error!r}")
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def between_deadline(harness: Harness) -> None:
    """The deadline counts from the latest item, regardless of the first-item deadline."""
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        began = _now()
        stream = await client.stream(3, deadlines=Deadlines(first_s=SOON_S, between_s=_SHORT_S))
        expect([await anext(stream) for _ in range(3)] == [0, 1, 2], "earlier items are delivered")
        error = await fails(DeadlineExceeded, anext(stream))
        expect(error.fields == {"stage": "between", "after_s": _SHORT_S}, f"{error!r}")
        expect(_now() - began < SOON_S / 2, "not at the end of the first deadline")
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def total_deadline(harness: Harness) -> None:
    async def tick(request: Any) -> AsyncIterator[int]:
        while True:
            yield 1
            await asyncio.sleep(_SHORT_S / 10)

    async with served(harness, tick) as (server, _, client):
        stream = await client.stream(None, deadlines=Deadlines(total_s=_SHORT_S))
        error = await fails(DeadlineExceeded, collect(stream))
        expect(error.fields.get("stage") == "total", f"{error!r}")
        await until(lambda: server.server.num_active == 0, "the end of the handler")


async def slow_reader_is_no_silent_sender(harness: Harness) -> None:
    """Only the sender's silence counts, not the time that the local reader takes."""
    async with served(harness, count_to) as (_, _, client):
        stream = await client.stream(500, deadlines=Deadlines(between_s=8 * _SHORT_S))
        got = [await anext(stream)]
        await asyncio.sleep(12 * _SHORT_S)
        got += await collect(stream)
        expect(got == list(range(500)), "nothing is lost")


async def server_enforces_deadline(harness: Harness) -> None:
    """The caller is unreachable but not yet known to be lost."""
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        total_s = harness.dead_after_s / 4
        began = _now()
        stream = await client.stream(1, deadlines=Deadlines(total_s=total_s))
        expect(await anext(stream) == 0, "it runs")
        await harness.isolate("caller")
        await until(lambda: probe.num_closed == 1, "the end of the handler")
        expect(probe.closed_at[0] - began < harness.dead_after_s, "ended by its deadline, not by the loss")
        await stream.aclose()


# -- lost peers


async def killed_peer_is_lost_at_once(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        streams = [await client.stream(1) for _ in range(50)]
        for stream in streams:
            expect(await anext(stream) == 0, "it runs")
        began = _now()
        await harness.cut("server")
        for stream in streams:
            error = await fails(WorkerLost, anext(stream))
            expect(error.retryable, "a retry is possible")
        expect(_now() - began < harness.dead_after_s, "at once, not after the heartbeat")
        await until(lambda: probe.num_closed == 50, "the end of every handler")


async def items_before_loss_are_delivered(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(5)
        await until(lambda: stream.num_queued == 5, "five items")
        await harness.cut("server")
        expect([await anext(stream) for _ in range(5)] == list(range(5)), "received items can be read")
        await fails(WorkerLost, anext(stream))


async def idle_connection_stays(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, caller, client):
        stream = await client.stream(1)
        expect(await anext(stream) == 0, "it runs")
        before = caller.plane.gauges().num_open
        await asyncio.sleep(1.6 * harness.dead_after_s)
        expect(probe.num_closed == 0, "a silent stream does not mean a silent peer")
        expect(caller.plane.gauges().num_open == before, "the connection is kept")
        await stream.aclose()


async def lost_instance_leaves_and_returns(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        expect(await answers(client, 2) == [0, 1], "it answers")
        seen: list[int] = []
        client.on_change(lambda: seen.append(len(client.candidates())))
        await harness.isolate("server")
        await until(lambda: client.candidates() == [], "the instance leaves the candidates")
        expect(len(client.instances()) == 1, "discovery still lists it")
        await fails(Unavailable, client.stream(1))
        await harness.rejoin("server")
        await until(lambda: len(client.candidates()) == 1, "it returns without a probe request")
        expect(await answers(client, 2) == [0, 1], "it responds again")
        expect(seen[0] == 0 and seen[-1] == 1, f"listeners are notified: {seen}")


async def lost_instance_leaves_before_its_streams_end(harness: Harness) -> None:
    """A retry at the end of a stream must not select the lost instance."""
    probe = Probe()
    seen: list[int] = []

    class Retry:
        def on_item(self, item: Any) -> None: ...

        def on_end(self, error: KvoltError | None) -> None:
            expect(isinstance(error, WorkerLost), f"{error!r}")
            seen.append(len(client.candidates()))

    async with served(harness, probe.forever) as (_, _, client):
        await client.call(0, Retry())
        await until(lambda: probe.num_started == 1, "the handler's start")
        await harness.cut("server")
        await until(lambda: len(seen) == 1, "the end of the call")
        expect(seen == [0], "the instance is no candidate any more")


async def one_lost_instance_of_two(harness: Harness) -> None:
    first, second = await harness.runtime("first"), await harness.runtime("second")
    for server in (first, second):
        await server.serve(ENDPOINT, count_to, int)
    client = await client_of(await harness.runtime("caller"), num_instances=2)
    for _ in range(4):
        await answers(client, 1)
    await harness.isolate("first")
    await until(lambda: len(client.candidates()) == 1, "one is lost")
    for _ in range(6):
        expect(await answers(client, 2) == [0, 1], "every call goes to the other")


# -- instances and their states


async def instances_come_and_go(harness: Harness) -> None:
    caller = await harness.runtime("caller")
    client = await client_of(caller, num_instances=0)
    first = await harness.runtime("first")
    instance = await first.serve(ENDPOINT, count_to, int, info={"name": "first"})
    await until(lambda: client.candidates() == [instance], "the first instance")
    second = await harness.runtime("second")
    await second.serve(ENDPOINT, count_to, int)
    await until(lambda: len(client.candidates()) == 2, "the second one")
    await first.stop_serving(ENDPOINT)
    await until(lambda: len(client.instances()) == 1, "the first one leaves")
    await second.close()
    await until(lambda: client.instances() == [], "a closed process leaves at once")


async def cordon_and_resume(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (server, _, client):
        (instance,) = client.candidates()
        running = await client.stream(3)
        expect(await anext(running) == 0, "it runs")
        await server.cordon()
        error = await fails(Unavailable, collect(await client.stream(1, instance=instance)))
        expect(error.fields.get("reason") == "cordoned", f"{error!r}")
        await until(lambda: client.candidates() == [], "a cordoned instance is no candidate")
        expect(client.instances()[0].state is InstanceState.CORDONED, "a cordoned instance is still listed")
        expect([await anext(running), await anext(running)] == [1, 2], "running streams continue")
        await server.resume()
        await until(lambda: len(client.candidates()) == 1, "it is a candidate again")
        another = await client.stream(1)
        expect(await anext(another) == 0, "it is called again")
        for stream in (running, another):
            await stream.aclose()


async def drain_finishes_running_streams(harness: Harness) -> None:
    gate = asyncio.Event()

    async def gated(number: int) -> AsyncIterator[int]:
        yield 0
        await gate.wait()
        for value in range(1, number):
            yield value

    async with served(harness, gated) as (server, _, client):
        (instance,) = client.candidates()
        running = [await client.stream(100) for _ in range(5)]
        for stream in running:
            expect(await anext(stream) == 0, "it runs")
        async with Scope("drain") as scope:
            drain = scope.start(server.drain(SOON_S), "drain")
            await until(lambda: client.candidates() == [], "a draining instance is no candidate")
            await asyncio.sleep(
                2 * server.options.announce_s
            )  # until then callers that were not notified are served
            error = await fails(Unavailable, collect(await client.stream(1, instance=instance)))
            expect(error.fields.get("reason") == "draining", f"{error!r}")
            expect(not drain.done(), "it waits for running streams")
            gate.set()
            for stream in running:
                expect(await collect(stream) == list(range(1, 100)), "running streams are finished")


async def close_with_timeout_finishes_running_streams(harness: Harness) -> None:
    async def slowly(number: int) -> AsyncIterator[int]:
        for value in range(number):
            yield value
            await asyncio.sleep(0.01)

    async with served(harness, slowly) as (server, _, client):
        stream = await client.stream(20)
        expect(await anext(stream) == 0, "it runs")
        async with Scope("close") as scope:
            scope.start(server.close(SOON_S), "close")
            expect(await collect(stream) == list(range(1, 20)), "the stream is finished")
        await until(lambda: client.instances() == [], "the process leaves")


async def close_without_timeout_is_retryable(harness: Harness) -> None:
    """The callers of a stopping server get a retryable error at once."""
    probe = Probe()
    async with served(harness, probe.forever) as (server, _, client):
        stream = await client.stream(1)
        expect(await anext(stream) == 0, "it runs")
        began = _now()
        await server.close()
        expect(probe.num_closed == 1, "the handler has ended when close returns")
        try:
            await anext(stream)
        except KvoltError as error:
            expect(error.retryable and not isinstance(error, Cancelled), f"{error!r}")
        else:
            raise AssertionError("the stream continued")
        expect(_now() - began < harness.dead_after_s, "at once")
        await server.close()


async def closed_caller_ends_its_calls(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (server, caller, client):
        stream = await client.stream(1)
        expect(await anext(stream) == 0, "it runs")
        await caller.close()
        await until(lambda: probe.num_closed == 1, "the end of the handler")
        await fails(WorkerLost, anext(stream))
        await until(lambda: server.plane.gauges().num_open == 0, "no connection is left")
        await fails(ConnectFailed, client.stream(1))


async def close_leaves_no_task(harness: Harness) -> None:
    before = asyncio.all_tasks()
    probe = Probe()
    async with served(harness, probe.forever) as (server, caller, client):
        stream = await client.stream(1)
        expect(await anext(stream) == 0, "it runs")
        task_group = TaskGroup("waiting")
        task_group.start(_ignore_end(stream), "reader")
        await server.close()
        await caller.close()
        await task_group.drain()
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    expect(not left, f"left: {left}")


async def _ignore_end(stream: Any) -> None:
    with suppress(KvoltError):
        await anext(stream)


CASES: tuple[Case, ...] = (*cases_in(__name__), *plane_stall_cases.CASES)
