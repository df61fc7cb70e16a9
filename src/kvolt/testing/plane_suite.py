"""Conformance suite of a request plane: what a call must do, on any transport and any loop.

A case is an async function of a `Harness`, which makes processes (a `Runtime` each) that find each other
and knows how to break the way between them. With pytest, on a real loop:

    @pytest.mark.parametrize("case", plane_suite.CASES, ids=plane_suite.name)
    async def test_plane(case):
        await plane_suite.run_case(case, MyHarness)

and on the virtual loop: `run_virtual(lambda: run_case(case, MyHarness), until_s=600)`. The cases about
deadlines, losses and stopping are in `plane_faults_suite`.

Must not know any plane: cases see only Runtime, EndpointClient and what the handlers see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from kvolt.core.delta import Delta, FinishReason, Usage
from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    Unsupported,
)
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.call import ResponseStream
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.logs import bind, current_context
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.streams import ServedStream
from kvolt.runtime.tasks import Scope
from kvolt.testing.discovery_observer import SOON_S, expect

_POLL_S = 0.005

E = TypeVar("E", bound=BaseException)


class Harness(Protocol):
    """What the suite needs of a plane. Time passes with `asyncio.sleep`."""

    dead_after_s: float
    """How long a peer may be silent: long against the machine's hiccups, at most 5 s."""
    window_items: int
    """Items that may be on their way to a reader that takes none; at most 64."""
    max_message_bytes: int
    """Between 11 and 64 MB."""

    async def runtime(self, name: str) -> Runtime:
        """A started process that finds all others of this harness."""
        ...

    async def cut(self, runtime: Runtime) -> None:
        """End every connection of a process; both ends are told. New ones can be opened."""
        ...

    async def isolate(self, runtime: Runtime) -> None:
        """From now on nothing reaches a process or leaves it, and nobody is told."""
        ...

    async def rejoin(self, runtime: Runtime) -> None:
        """A process that was isolated can be reached again."""
        ...

    def num_connections(self, runtime: Runtime) -> int:
        """Connections that a process has open."""
        ...

    async def close(self) -> None:
        """Close every process made, then what they stood on."""
        ...


Case = Callable[[Harness], Awaitable[None]]


def name(case: Case) -> str:
    return getattr(case, "__name__", repr(case))


async def run_case(case: Case, make_harness: Callable[[], Harness], timeout_s: float = 50.0) -> None:
    """One case with a harness of its own, made on the running loop; it must leave no task behind."""
    before = asyncio.all_tasks()
    harness = make_harness()
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    expect(not left, f"tasks left behind: {left}")


# -- what cases are made of


ENDPOINT = EndpointAddress("ns", "worker", "generate")


@asynccontextmanager
async def served(
    harness: Harness, handler: Callable[[Any], AsyncIterator[Any]], kind: Any = Any
) -> AsyncIterator[tuple[Runtime, Runtime, EndpointClient]]:
    """A process that serves the handler, one that calls, and its client, which sees the instance."""
    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve(ENDPOINT, handler, kind)
    yield server, caller, await client_of(caller)


async def client_of(
    caller: Runtime, num_instances: int = 1, endpoint: EndpointAddress = ENDPOINT
) -> EndpointClient:
    client = await caller.client(endpoint)
    await client.wait_synced(SOON_S)
    await until(lambda: len(client.candidates()) == num_instances, f"{num_instances} candidates")
    return client


async def collect(stream: ResponseStream) -> list[Any]:
    async with asyncio.timeout(SOON_S):
        return [item async for item in stream]


async def answers(client: EndpointClient, request: Any) -> list[Any]:
    return await collect(await client.stream(request))


async def until(condition: Callable[[], bool], what: str, within_s: float = SOON_S) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - a condition of another process has no event
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not seen in {within_s:g} s: {what}") from None


async def fails(kind: type[E], work: Awaitable[Any]) -> E:
    """The error that the work must end with; not a subclass."""
    try:
        result = await work
    except BaseException as error:
        if type(error) is kind:
            return error
        raise
    raise AssertionError(f"no {kind.__name__} but {result!r:.200}")


async def count_to(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


class Probe:
    """A handler's life as its caller's test sees it."""

    def __init__(self) -> None:
        self.num_started = self.num_closed = self.num_sent = 0
        self.closed_at: list[float] = []

    async def forever(self, num_first: int) -> AsyncIterator[int]:
        """Some items, then silence until somebody ends it."""
        self.num_started += 1
        try:
            for value in range(num_first):
                self.num_sent += 1
                yield value
            await asyncio.Event().wait()
        finally:
            self.num_closed += 1
            self.closed_at.append(asyncio.get_running_loop().time())

    async def count_to(self, number: int) -> AsyncIterator[int]:
        for value in range(number):
            self.num_sent += 1
            yield value


# -- calls


async def one_answer(harness: Harness) -> None:
    async def double(number: int) -> AsyncIterator[int]:
        yield 2 * number

    async with served(harness, double, int) as (_, _, client):
        for number in (0, 21, -5):
            expect(await answers(client, number) == [2 * number], "one request, one answer")


async def no_answer(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        expect(await answers(client, 0) == [], "a stream may end without an item")


async def values_come_back_as_they_were(harness: Harness) -> None:
    async def echo(value: Any) -> AsyncIterator[Any]:
        yield value
        yield [value, value]

    values: list[Any] = [
        None,
        True,
        -(2**63),
        2**64 - 1,
        1.5,
        "",
        "é\0🜁",
        b"",
        bytes(range(256)),
        [],
        {},
        {"a": [{"b": None}]},
    ]
    async with served(harness, echo) as (_, _, client):
        for value in values:
            expect(await answers(client, value) == [value, [value, value]], f"{value!r} is changed")


async def stream_keeps_its_order(harness: Harness) -> None:
    async def mixed(number: int) -> AsyncIterator[Any]:
        for value in range(number):
            yield Delta((value,)) if value % 3 else value
            if value % 100 == 0:
                await asyncio.sleep(0)

    def flat(items: list[Any]) -> list[Any]:
        return [token for item in items for token in (item.token_ids if type(item) is Delta else (item,))]

    async with served(harness, mixed) as (_, _, client):
        expect(flat(await answers(client, 5000)) == list(range(5000)), "the order of items is kept")


async def deltas_come_back_as_deltas(harness: Harness) -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=70_000)
    long = Delta(tuple(range(70_000)), index=1)
    last = Delta((5,), finish=FinishReason.STOP, usage=usage)

    async def generate(request: Any) -> AsyncIterator[Delta]:
        yield Delta((1,))
        yield long
        yield last

    async with served(harness, generate) as (_, _, client):
        expect(await answers(client, None) == [Delta((1,)), long, last], "long or short, a Delta is a Delta")


async def a_thousand_streams_at_once(harness: Harness) -> None:
    gate = asyncio.Event()

    async def wait_then_count(number: int) -> AsyncIterator[int]:
        yield number
        await gate.wait()
        for value in range(3):
            yield number + value

    results: dict[int, list[int]] = {}
    async with served(harness, wait_then_count, int) as (_, _, client):
        streams = [await client.stream(number) for number in range(1000)]
        for number, stream in enumerate(streams):
            expect(await anext(stream) == number, "every stream has begun before one ends")
        gate.set()

        async def read(number: int) -> None:
            results[number] = await collect(streams[number])

        async with Scope("readers") as scope:
            for number in range(1000):
                scope.start(read(number), str(number))
    wanted = {number: [number, number + 1, number + 2] for number in range(1000)}
    expect(results == wanted, "no stream's items went to another")


async def calls_in_both_directions(harness: Harness) -> None:
    one, two = await harness.runtime("one"), await harness.runtime("two")
    there, back = EndpointAddress("ns", "one", "count"), EndpointAddress("ns", "two", "count")
    await one.serve(there, count_to, int)
    await two.serve(back, count_to, int)
    to_one, to_two = await client_of(two, endpoint=there), await client_of(one, endpoint=back)
    async with Scope("both") as scope:
        tasks = [scope.start(answers(client, 500), "count") for client in (to_one, to_two) * 5]
    expect(all(task.result() == list(range(500)) for task in tasks), "both directions work at once")


async def a_call_back_needs_no_new_connection(harness: Harness) -> None:
    async with served(harness, count_to) as (server, caller, client):
        back = EndpointAddress("ns", "caller", "count")
        await caller.serve(back, count_to, int)
        await answers(client, 3)
        before = harness.num_connections(caller), harness.num_connections(server)
        expect(await answers(await client_of(server, endpoint=back), 3) == [0, 1, 2], "the call back works")
        after = harness.num_connections(caller), harness.num_connections(server)
        expect(before == after, f"connections: {before} before, {after} after")


async def round_robin_takes_turns(harness: Harness) -> None:
    async def say_who(who: str) -> AsyncIterator[str]:
        yield who

    names = ["a", "b", "c"]
    for server_name in names:
        server = await harness.runtime(server_name)

        async def handler(request: Any, answer: str = server_name) -> AsyncIterator[str]:
            yield answer

        await server.serve(ENDPOINT, handler)
    client = await client_of(await harness.runtime("caller"), num_instances=3)
    got = [(await answers(client, None))[0] for _ in range(6)]
    expect(sorted(got) == sorted(names * 2), f"each gets its turn: {got}")
    for instance in client.candidates():
        first, second = [await collect(await client.stream(None, instance=instance)) for _ in range(2)]
        expect(first == second, "a chosen instance gets the call")


async def context_travels(harness: Harness) -> None:
    async def context(request: Any) -> AsyncIterator[dict[str, str]]:
        yield current_context()

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served(harness, context) as (_, _, client):
        with bind(request_id="r-1", traceparent=trace):
            got = await answers(client, None)
        expect(got == [{"request_id": "r-1", "traceparent": trace}], f"the ids reach the handler: {got}")
        expect(await answers(client, None) == [{}], "and no other call's")


# -- errors


async def errors_come_back_whole(harness: Harness) -> None:
    errors: dict[str, KvoltError] = {
        error.code: error
        for error in (
            KvoltError("base", number=1),
            InvalidRequest("bad", param="x"),
            PayloadTooLarge("big", limit_bytes=2**40, size_bytes=2**41),
            NotFound("none", kind="card", name="é"),
            Unsupported("not here", feature="logprobs"),
            Cancelled("stop"),
            ConfigError("wrong", key="k", remedy="r"),
            Overloaded("full", queue="q", limit=7, retry_after_s=0.25),
            Unavailable("away", endpoint="e", reason="none"),
            EngineFailed("died", engine="sim", fatal=True, code_seen=None),
        )
    }

    async def fail(code: str) -> AsyncIterator[int]:
        yield 1
        raise errors[code]

    async with served(harness, fail, str) as (_, _, client):
        for code, error in errors.items():
            stream = await client.stream(code)
            expect(await anext(stream) == 1, "what came before the error is delivered")
            got = await fails(type(error), anext(stream))
            expect((got.message, got.fields) == (error.message, error.fields), f"{got!r} is not {error!r}")
            expect(got.retryable == error.retryable, "and says the same about trying again")


async def a_handlers_bug_tells_no_secrets(harness: Harness) -> None:
    async def bug(request: Any) -> AsyncIterator[int]:
        yield 1
        raise ValueError("the password is 1234")

    async with served(harness, bug) as (_, _, client):
        stream = await client.stream(None)
        expect(await anext(stream) == 1, "the item before the bug")
        error = await fails(KvoltError, anext(stream))
        expect("1234" not in f"{error!r}" and "ValueError" in error.message, f"only the type: {error!r}")
        expect(await anext(await client.stream(None)) == 1, "and the process serves on")


async def a_handlers_own_timeout_is_no_deadline(harness: Harness) -> None:
    async def bug(request: Any) -> AsyncIterator[int]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
        yield 1

    async with served(harness, bug) as (_, _, client):
        await fails(KvoltError, answers(client, None))


async def errors_that_are_hard_to_send(harness: Harness) -> None:
    """Whatever a handler puts into an error, it ends its own stream, and no other."""
    hard: list[KvoltError] = [
        EngineFailed("x" * 5_000_000, engine="sim"),
        EngineFailed("a lone surrogate \ud800", engine="\udfff"),
        EngineFailed("a big number", engine=2**100),
        EngineFailed("no value of the wire", engine=["list"]),  # type: ignore[arg-type]
    ]

    async def fail(number: int) -> AsyncIterator[int]:
        yield number
        raise hard[number]

    async with served(harness, fail, int) as (server, _, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(
            await harness.runtime("other"), endpoint=EndpointAddress("ns", "worker", "count")
        )
        beside = await other.stream(1000)
        for number in range(len(hard)):
            stream = await client.stream(number)
            expect(await anext(stream) == number, "the item before the error")
            await fails(EngineFailed, anext(stream))
        expect(await collect(beside) == list(range(1000)), "a stream beside goes on")


async def unknown_endpoint(harness: Harness) -> None:
    async with served(harness, count_to) as (server, _, client):
        (instance,) = client.candidates()
        await server.withdraw(ENDPOINT)
        error = await fails(NotFound, collect(await client.stream(3, instance=instance)))
        expect(error.fields.get("name") == str(ENDPOINT), f"it says what: {error!r}")


async def stale_instance(harness: Harness) -> None:
    """The same endpoint at the same address, but another life of it."""
    async with served(harness, count_to) as (server, _, client):
        (old,) = client.candidates()
        await server.withdraw(ENDPOINT)
        new = await server.serve(ENDPOINT, count_to, int)
        error = await fails(Unavailable, collect(await client.stream(3, instance=old)))
        expect(error.retryable, "another instance may take it")
        expect(await collect(await client.stream(3, instance=new)) == [0, 1, 2], "the new one answers")


async def no_instances(harness: Harness) -> None:
    caller = await harness.runtime("caller")
    client = await caller.client(ENDPOINT)
    await client.wait_synced(SOON_S)
    expect(client.candidates() == [], "nobody serves it")
    await fails(Unavailable, client.stream(None))


async def request_of_another_type(harness: Harness) -> None:
    async with served(harness, count_to, int) as (_, _, client):
        await fails(InvalidRequest, answers(client, "three"))
        expect(await answers(client, 3) == [0, 1, 2], "the next request is served")


# -- sizes


async def long_messages_beside_short_ones(harness: Harness) -> None:
    """10 MB in both directions; what is short overtakes it on other streams, never on its own."""
    big = bytes(range(256)) * 40_000
    begun = asyncio.Event()

    async def send_big(request: bytes) -> AsyncIterator[Any]:
        yield "first"
        yield request
        yield "middle"
        begun.set()
        yield request
        yield "last"

    order: list[str] = []
    async with served(harness, send_big) as (server, caller, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        small = await client_of(caller, endpoint=EndpointAddress("ns", "worker", "count"))

        async def read_big() -> None:
            got = await answers(client, big)
            order.append("big")
            expect(got == ["first", big, "middle", big, "last"], "long and short items keep their order")

        async def read_small() -> None:
            async with asyncio.timeout(SOON_S):
                await begun.wait()
            expect(await answers(small, 200) == list(range(200)), "the short stream is whole")
            order.append("small")

        async with Scope("readers") as scope:
            scope.start(read_big(), "big")
            scope.start(read_small(), "small")
    expect(order == ["small", "big"], "the short stream did not wait for the long one")


async def many_long_messages(harness: Harness) -> None:
    async def echo(value: Any) -> AsyncIterator[Any]:
        yield value
        yield len(value)

    async with served(harness, echo) as (_, _, client):
        bodies = [bytes([number]) * (100_000 + number) for number in range(12)]
        async with Scope("readers") as scope:
            tasks = [scope.start(answers(client, body), "echo") for body in bodies]
        for body, task in zip(bodies, tasks, strict=True):
            expect(task.result() == [body, len(body)], "each stream gets its own")


async def too_long_a_request(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        beside = await client.stream(100)
        error = await fails(PayloadTooLarge, client.stream(b"x" * (harness.max_message_bytes + 1)))
        expect(error.fields.get("limit_bytes") == harness.max_message_bytes, f"it says the limit: {error!r}")
        expect(await collect(beside) == list(range(100)), "a stream beside goes on")


async def an_item_that_cannot_leave(harness: Harness) -> None:
    """Too long, or nothing that can be encoded: the items before it arrive, then its stream fails."""
    too_long = b"x" * (harness.max_message_bytes + 1)
    bad: dict[str, tuple[Any, type[KvoltError]]] = {
        "too long": (too_long, PayloadTooLarge),
        "no value": (object(), KvoltError),
        "a number": (2**70, KvoltError),
        "text": ("\ud800", KvoltError),
    }

    async def send(request: tuple[str, int]) -> AsyncIterator[Any]:
        what, num_after = request
        yield 1
        yield bad[what][0]
        for value in range(num_after):
            yield value

    async with served(harness, send, tuple[str, int]) as (server, caller, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(caller, endpoint=EndpointAddress("ns", "worker", "count"))
        for what, (_, kind) in bad.items():
            for num_after in (0, 3):
                beside = await other.stream(300)
                stream = await client.stream((what, num_after))
                expect(await anext(stream) == 1, "the item before it arrives")
                error = await fails(kind, anext(stream))
                expect(not error.retryable, f"{what}: {error!r}")
                expect(await collect(beside) == list(range(300)), "a stream beside goes on")


# -- slow readers


async def a_slow_reader_slows_its_handler(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.count_to) as (_, _, client):
        stream = await client.stream(3000)
        got = [await anext(stream) for _ in range(10)]
        await asyncio.sleep(0.3)
        bound = 2 * harness.window_items + 20
        expect(probe.num_sent <= bound, f"{probe.num_sent} items were made for a reader of 10")
        got += await collect(stream)
        expect(got == list(range(3000)), "nothing is lost, doubled or out of order")


async def a_slow_reader_slows_no_other(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        slow = await client.stream(3000)
        await anext(slow)
        for _ in range(3):
            expect(await answers(client, 1000) == list(range(1000)), "a quick reader gets all")
        expect(await collect(slow) == list(range(1, 3000)), "the slow one, too, in its time")


async def deltas_merge_for_a_slow_reader(harness: Harness) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=5000)

    def push(stream: ServedStream) -> None:
        for token in range(5000):
            stream.send(Delta((token,)))
        stream.send(Delta((), finish=FinishReason.LENGTH, usage=usage))
        stream.end()

    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve_streams(ENDPOINT, push)
    client = await client_of(caller)
    stream = await client.stream(None)
    await asyncio.sleep(0.3)
    got = await collect(stream)
    tokens = [token for delta in got for token in delta.token_ids]
    expect(tokens == list(range(5000)), "every token once, in order")
    expect(len(got) <= 2 * harness.window_items + 2, f"in {len(got)} deltas")
    expect((got[-1].finish, got[-1].usage) == (FinishReason.LENGTH, usage), "the finish is kept")


async def too_many_items_for_a_slow_reader(harness: Harness) -> None:
    """What does not merge and is pushed without asking has a bound, and the reader is told."""
    told: list[KvoltError] = []

    def push(stream: ServedStream) -> None:
        stream.on_cancel = told.append
        for value in range(20_000):
            stream.send(value)

    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve_streams(ENDPOINT, push)
    client = await client_of(caller)
    stream = await client.stream(None)
    got: list[int] = []

    async def read() -> None:
        async for item in stream:
            got.append(item)

    await fails(Overloaded, read())
    expect(got == list(range(len(got))), "what came is the beginning")
    await until(lambda: len(told) == 1, "the producer is told")


# -- the caller gives up


async def cancel_before_the_first_item(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(0)
        await until(lambda: probe.num_started == 1, "the handler's start")
        await stream.aclose()
        await until(lambda: probe.num_closed == 1, "the end of the handler")
        await fails(Cancelled, anext(stream))


async def cancel_after_the_first_item(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(2)
        expect(await anext(stream) == 0, "the first item")
        await stream.aclose()
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancel_at_once(harness: Harness) -> None:
    """The request and its cancel may meet on the way: the handler runs not at all, or ends."""
    probe = Probe()
    async with served(harness, probe.forever) as (server, _, client):
        for _ in range(20):
            await (await client.stream(1)).aclose()
        await asyncio.sleep(0.05)
        await until(lambda: probe.num_closed == probe.num_started, "the end of every handler")
        await until(lambda: server.server.num_active == 0, "nothing is served")


async def leaving_the_block_cancels(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        async with await client.stream(5) as stream:
            async for item in stream:
                if item == 2:
                    break
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancelling_the_reader_cancels(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):

        async def read() -> None:
            async with await client.stream(1) as stream:
                async for _ in stream:
                    pass

        async with Scope("reader") as scope:
            scope.start(read(), "read")
            await until(lambda: probe.num_sent == 1, "the first item")
            scope.cancel()
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancel_while_a_long_answer_comes(harness: Harness) -> None:
    big = b"x" * 5_000_000
    probe = Probe()

    async def send(number: int) -> AsyncIterator[Any]:
        yield "first"
        try:
            while True:
                yield big
        finally:
            probe.num_closed += 1

    async with served(harness, send) as (server, _, client):
        for _ in range(6):
            stream = await client.stream(1)
            expect(await anext(stream) == "first", "it begins")
            await stream.aclose()
        await until(lambda: probe.num_closed == 6, "the end of every handler")
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(
            await harness.runtime("other"), endpoint=EndpointAddress("ns", "worker", "count")
        )
        expect(await answers(other, 10) == list(range(10)), "the process serves on")
        stream = await client.stream(1)
        expect([await anext(stream), await anext(stream)] == ["first", big], "and so does the connection")
        await stream.aclose()


CASES: tuple[Case, ...] = (
    one_answer,
    no_answer,
    values_come_back_as_they_were,
    stream_keeps_its_order,
    deltas_come_back_as_deltas,
    a_thousand_streams_at_once,
    calls_in_both_directions,
    a_call_back_needs_no_new_connection,
    round_robin_takes_turns,
    context_travels,
    errors_come_back_whole,
    a_handlers_bug_tells_no_secrets,
    a_handlers_own_timeout_is_no_deadline,
    errors_that_are_hard_to_send,
    unknown_endpoint,
    stale_instance,
    no_instances,
    request_of_another_type,
    long_messages_beside_short_ones,
    many_long_messages,
    too_long_a_request,
    an_item_that_cannot_leave,
    a_slow_reader_slows_its_handler,
    a_slow_reader_slows_no_other,
    deltas_merge_for_a_slow_reader,
    too_many_items_for_a_slow_reader,
    cancel_before_the_first_item,
    cancel_after_the_first_item,
    cancel_at_once,
    leaving_the_block_cancels,
    cancelling_the_reader_cancels,
    cancel_while_a_long_answer_comes,
)
