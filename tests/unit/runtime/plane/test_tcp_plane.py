"""All connections of a process: one per peer, shared dials, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvolt.core.errors import ConnectFailed, DeadlineExceeded, KvoltError, NetworkFault, WorkerLost
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.logs import bind, current_context
from kvolt.runtime.network import Listener, ProtocolFactory
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import Destination, IncomingStream
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.stats import PlaneGauges
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.tasks import Scope
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork


class Ignore:
    def on_item(self, item: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None: ...


class World:
    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(1))
        self.made: list[TcpPlane] = []

    def process(self, name: str) -> TcpPlane:
        def serve(stream: IncomingStream) -> None:
            stream.end()

        made = TcpPlane(self.network.host(name), ConnectionOptions(), name, serve)
        self.made.append(made)
        return made

    async def listening(self, name: str) -> TcpPlane:
        made = self.process(name)
        await made.listen(f"{name}:7000")
        return made


def in_world(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        world = World()
        try:
            await test(world)
        finally:
            for made in world.made:
                await made.close()
            world.network.close()

    def run() -> None:
        run_virtual(main)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_world
async def test_one_connection_for_all_callers(world: World) -> None:
    server, client = await world.listening("server"), world.process("client")
    assert client.ready_to("server:7000") is None
    async with Scope("callers") as scope:
        tasks = [scope.start(client.get("server:7000", 5.0), str(number)) for number in range(20)]
    first = tasks[0].result()
    assert all(task.result() is first for task in tasks)
    assert await client.get("server:7000", 5.0) is first
    assert client.ready_to("server:7000") is first
    assert (client.num_open, server.num_open) == (1, 1)
    assert client.stats.connects == {"ok": 1}


@in_world
async def test_the_other_side_uses_it_too(world: World) -> None:
    one, two = await world.listening("one"), await world.listening("two")
    connection = await one.get("two:7000", 5.0)
    await asyncio.sleep(0.1)
    back = two.ready_to("one:7000")
    assert back is not None
    assert back is await two.get("one:7000", 5.0)
    assert not back.dialer
    assert connection.dialer
    assert (one.num_open, two.num_open) == (1, 1)


@in_world
async def test_a_host_gets_no_calls_to_an_address_of_another(world: World) -> None:
    """Whatever its hello claims: the address is dialed."""
    await world.listening("worker")
    caller, intruder = await world.listening("caller"), world.process("intruder")
    await intruder.listen("intruder:7000", advertise="worker:7000")
    await intruder.ensure_connected("caller:7000", 5.0)
    await asyncio.sleep(0.1)
    assert caller.num_open == 1
    assert caller.ready_to("worker:7000") is None
    assert (await caller.get("worker:7000", 5.0)).dialer


@in_world
async def test_both_dial_at_once(world: World) -> None:
    one, two = await world.listening("one"), await world.listening("two")
    async with Scope("both") as scope:
        there = scope.start(one.get("two:7000", 5.0), "there")
        back = scope.start(two.get("one:7000", 5.0), "back")
    for connections, connection in ((one, there.result()), (two, back.result())):
        assert connection.ready
        assert connections.all()


@in_world
async def test_nobody_listens(world: World) -> None:
    world.network.host("server")
    client = world.process("client")
    with pytest.raises(ConnectFailed) as caught:
        await client.get("server:7000", 5.0)
    assert caught.value.fields["address"] == "server:7000"
    assert client.stats.connects == {"connect_failed": 1}
    assert client.num_open == 0
    await world.listening("server")
    assert (await client.get("server:7000", 5.0)).ready


@in_world
async def test_a_host_that_does_not_answer(world: World) -> None:
    await world.listening("server")
    client = world.process("client")
    world.network.partition("client", "server")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ConnectFailed):
        await client.get("server:7000", 2.0)
    assert loop.time() - began == pytest.approx(2.0, abs=0.1)


@in_world
async def test_a_hasty_caller_does_not_fail_the_others(world: World) -> None:
    """They share the dial, not the deadline."""
    await world.listening("server")
    client = world.process("client")
    world.network.slow("client", "server", latency_s=0.5, bytes_per_s=None)
    async with Scope("callers") as scope:

        async def hasty() -> None:
            with pytest.raises(ConnectFailed):
                await client.get("server:7000", 0.2)

        scope.start(hasty(), "hasty")
        patient = scope.start(client.get("server:7000", 5.0), "patient")
    assert patient.result().ready
    assert client.num_open == 1


@in_world
async def test_a_caller_who_is_cancelled_does_not_stop_the_dial(world: World) -> None:
    await world.listening("server")
    client = world.process("client")
    async with Scope("callers") as scope:
        first = scope.start(client.get("server:7000", 5.0), "first")
        second = scope.start(client.get("server:7000", 5.0), "second")
        await asyncio.sleep(0)
        first.cancel()
    assert second.result().ready


@in_world
async def test_a_listener_that_says_nothing(world: World) -> None:
    class Mute(asyncio.Protocol):
        pass

    await world.network.host("server").listen("server:7000", Mute)
    client = world.process("client")
    with pytest.raises(ConnectFailed):
        await client.get("server:7000", 2.0)
    await asyncio.sleep(6)
    assert client.num_open == 0, "it was given up for good"


@in_world
async def test_a_listener_that_closes_at_once(world: World) -> None:
    class Rude(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    await world.network.host("server").listen("server:7000", Rude)
    client = world.process("client")
    with pytest.raises(ConnectFailed):
        await client.get("server:7000", 2.0)
    assert client.num_open == 0


@in_world
async def test_a_listener_of_another_protocol(world: World) -> None:
    class Http(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")  # type: ignore[attr-defined]

    await world.network.host("server").listen("server:7000", Http)
    client = world.process("client")
    with pytest.raises(NetworkFault):
        await client.get("server:7000", 2.0)
    assert client.num_open == 0


@in_world
async def test_what_is_no_address(world: World) -> None:
    client = world.process("client")
    for _ in range(2):
        with pytest.raises(ConnectFailed):
            await client.get("nonsense", 1.0)


@in_world
async def test_a_name_that_no_resolver_takes(world: World) -> None:
    """Whatever the network raises, whoever waits hears of it, and the next caller dials anew."""

    class Odd:
        async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
            raise NotImplementedError

        async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
            raise UnicodeError("label too long")

    client = TcpPlane(Odd(), ConnectionOptions(), "odd", lambda stream: None)
    world.made.append(client)
    for _ in range(2):
        with pytest.raises(ConnectFailed, match="label too long"):
            await client.get("x" * 100 + ":80", 3.0)


@in_world
async def test_losses_are_told_by_address(world: World) -> None:
    await world.listening("server")
    client = world.process("client")
    lost: list[tuple[str, type[KvoltError]]] = []

    def listener(address: str, reason: KvoltError) -> None:
        assert client.ready_to(address) is None
        lost.append((address, type(reason)))

    client.on_closed(listener)
    await client.get("server:7000", 5.0)
    world.network.cut("client", "server", silent=False)
    await asyncio.sleep(0.1)
    assert lost == [("server:7000", WorkerLost)]
    assert client.num_open == 0
    assert client.stats.losses == {"closed": 1}
    client.remove_listeners(listener)
    client.remove_listeners(listener)
    assert (await client.get("server:7000", 5.0)).ready
    world.network.cut("client", "server", silent=False)
    await asyncio.sleep(0.1)
    assert len(lost) == 1


@in_world
async def test_an_older_connection_does_not_take_the_newer_one_along(world: World) -> None:
    one, two = await world.listening("one"), await world.listening("two")
    first = await one.get("two:7000", 5.0)
    await asyncio.sleep(0.1)
    two.all()[0].session.go_away()
    await asyncio.sleep(0.1)
    assert not first.ready
    second = await one.get("two:7000", 5.0)
    assert second is not first
    first.close(WorkerLost("old"))
    await asyncio.sleep(0.1)
    assert one.ready_to("two:7000") is second


@in_world
async def test_going_away_holds_for_connections_to_come(world: World) -> None:
    server, client = await world.listening("server"), world.process("client")
    server.go_away()
    connection = await client.get("server:7000", 5.0)
    await asyncio.sleep(0.1)
    assert not connection.ready


@in_world
async def test_close_ends_everything(world: World) -> None:
    server, client = await world.listening("server"), world.process("client")
    connection = await client.get("server:7000", 5.0)
    world.network.host("far")
    async with Scope("dial") as scope:

        async def dial() -> None:
            with pytest.raises(ConnectFailed):
                await client.get("far:1", 60.0)

        world.network.partition("client", "far")
        scope.start(dial(), "dial")
        await asyncio.sleep(0.1)
        await client.close()
    assert connection.closed is not None
    assert client.num_open == 0
    await asyncio.sleep(0.1)
    assert server.num_open == 0
    with pytest.raises(ConnectFailed):
        await client.get("server:7000", 1.0)
    await client.close()


@in_world
async def test_the_first_address_is_what_others_are_told(world: World) -> None:
    server = world.process("server")
    assert server.address is None
    assert await server.listen("server:0") == "server:49152"
    await server.listen("server:8000")
    assert server.address == "server:49152"
    other = world.process("other")
    await other.listen("other:0", advertise="public:1")
    assert other.address == "public:1"


@in_world
async def test_open_dials_and_tells_what_is_left_of_the_deadline(world: World) -> None:
    told: list[float | None] = []

    def serve(stream: IncomingStream) -> None:
        told.append(stream.deadline_s)
        stream.end()

    server = TcpPlane(world.network.host("server"), ConnectionOptions(), "server", serve)
    world.made.append(server)
    await server.listen("server:7000")
    client = world.process("client")
    world.network.slow("client", "server", latency_s=0.5, bytes_per_s=None)
    for _ in range(2):
        await client.open(
            Destination("server:7000", "ns.c.e"), b"\xc0", Ignore(), bytes, connect_s=5.0, deadline_s=30.0
        )
    await asyncio.sleep(2)
    first, second = told
    assert first is not None
    assert 27.0 < first < 29.1, "a dial and two hellos at half a second each way"
    assert second == 30.0
    assert client.num_open == 1


@in_world
async def test_gauges(world: World) -> None:
    server, client = await world.listening("server"), world.process("client")
    limit = 4 * SessionLimits().max_message_bytes
    assert client.gauges() == PlaneGauges(unfinished_limit_bytes=limit)
    await client.ensure_connected("server:7000", 5.0)
    assert client.gauges() == PlaneGauges(num_dialed=1, unfinished_limit_bytes=limit)
    assert server.gauges() == PlaneGauges(num_accepted=1, unfinished_limit_bytes=limit)
    assert client.gauges().num_open == server.gauges().num_open == 1


@in_world
async def test_advertise_a_host_alone(world: World) -> None:
    for advertise, told in (
        ("public", "public:49152"),
        ("fe80::1", "[fe80::1]:49152"),
        ("[::1]:5", "[::1]:5"),
    ):
        name = advertise.strip("[]").replace(":", "")
        server = world.process(name)
        await server.listen(f"{name}:0", advertise)
        assert server.address == told


@in_world
async def test_what_a_connection_logs_names_no_request(world: World) -> None:
    """Neither the one that it was dialed for, nor in the process of the peer."""
    await world.listening("b")
    seen: list[dict[str, str]] = []
    caller = world.process("a")
    caller.on_silent(lambda address, is_silent: seen.append(current_context()))
    with bind(request_id="first"):
        await caller.ensure_connected("b:7000", 1.0)
        assert current_context() == {"request_id": "first"}
    world.network.pause("b")
    await asyncio.sleep(5.0)
    assert seen == [{}]


# --- silent peers


@in_world
async def test_a_peer_that_answers_a_new_dial_has_lost_the_old_connection(world: World) -> None:
    """As after a firewall forgot it: no reset comes, and the streams need not wait for the grace."""
    await world.listening("b")
    caller = world.process("a")
    silences: list[tuple[str, bool]] = []
    caller.on_silent(lambda address, is_silent: silences.append((address, is_silent)))
    old = await caller.get("b:7000", 1.0)
    world.network.cut("a", "b", silent=True)
    await asyncio.sleep(4.5)
    assert old.silent
    new = await caller.get("b:7000", 1.0)
    assert silences == [("b:7000", True), ("b:7000", False)], "the peer is not silent"
    assert new is not old
    assert old.closed is None
    await asyncio.sleep(4.5)
    assert isinstance(old.closed, WorkerLost)
    assert caller.all() == [new]
    assert world.made[0].num_open == 1, "the other side has dropped it, too"


@in_world
async def test_a_peer_that_answers_again_ends_the_dials_to_it(world: World) -> None:
    await world.listening("b")
    caller = world.process("a")
    old = await caller.get("b:7000", 1.0)
    world.network.pause("b")
    await asyncio.sleep(4.5)
    async with Scope("dials") as scope:
        dials = [scope.start(caller.get("b:7000", 5.0), "dial") for _ in range(2)]
        await asyncio.sleep(2.0)
        assert not any(dial.done() for dial in dials)
        world.network.resume("b")
    assert [dial.result() for dial in dials] == [old, old]
    await asyncio.sleep(0.1)
    assert caller.all() == [old]


@in_world
async def test_a_peer_that_answers_before_a_dial_begins_can_be_dialed_later(world: World) -> None:
    await world.listening("b")
    caller = world.process("a")
    old = await caller.get("b:7000", 1.0)
    world.network.pause("b")
    await asyncio.sleep(4.5)
    assert old.silent
    async with Scope("dials") as scope:
        dial = scope.start(caller.get("b:7000", 5.0), "dial")
        await asyncio.sleep(0)
        old.silent = False
        caller._on_silent(old)
        world.network.resume("b")
    assert dial.result() is old
    old.abort(WorkerLost("gone", address="b:7000"))
    new = await caller.get("b:7000", 5.0)
    assert new is not old
    assert new.closed is None


@in_world
async def test_only_the_same_process_takes_the_place_of_a_silent_one(world: World) -> None:
    worker, caller = await world.listening("worker"), await world.listening("caller")
    silent = await caller.get("worker:7000", 1.0)
    world.network.cut("caller", "worker", silent=True)
    await asyncio.sleep(4.5)
    assert silent.silent
    other = TcpPlane(world.network.host("worker"), ConnectionOptions(), "other", lambda stream: None)
    world.made.append(other)
    await other.listen("worker:7001", advertise="worker:7000")
    await other.ensure_connected("caller:7000", 1.0)
    await asyncio.sleep(0.1)
    assert caller.num_open == 2
    assert caller.ready_to("worker:7000") is None
    await worker.ensure_connected("caller:7000", 1.0)
    await asyncio.sleep(0.1)
    back = caller.ready_to("worker:7000")
    assert back is not None
    assert back.session.peer is not None
    assert (back.dialer, back.session.peer.process) == (False, "worker")


@in_world
async def test_only_the_same_host_takes_the_place_of_a_silent_peer(world: World) -> None:
    worker, caller = world.process("worker"), await world.listening("caller")
    await worker.ensure_connected("caller:7000", 1.0)
    [silent] = caller.all()
    world.network.cut("caller", "worker", silent=True)
    await asyncio.sleep(4.5)
    assert silent.silent
    intruder = TcpPlane(world.network.host("elsewhere"), ConnectionOptions(), "worker", lambda stream: None)
    world.made.append(intruder)
    await intruder.ensure_connected("caller:7000", 1.0)
    await asyncio.sleep(10.0)
    assert silent.closed is None, "a process elsewhere that claims its name ends no stream of it"
    await worker.ensure_connected("caller:7000", 1.0)
    await asyncio.sleep(4.5)
    assert isinstance(silent.closed, WorkerLost)


@in_world
async def test_stalls_put_a_deadline_off_by_their_length_only(world: World) -> None:
    """However often they come: a peer that is alive and does not answer is given up."""
    server = TcpPlane(world.network.host("b"), ConnectionOptions(), "b", lambda stream: None)
    world.made.append(server)
    await server.listen("b:7000")
    loop = asyncio.get_running_loop()
    limits = Deadlines(first_s=30.0, between_s=30.0, total_s=600.0)
    answers = await open_stream(world.process("a"), Destination("b:7000", "ns.c.e"), None, limits)
    began = loop.time()
    for _ in range(4):
        await asyncio.sleep(20.0)
        loop._now += 2.0  # type: ignore[attr-defined]  # the whole loop stands still
    with pytest.raises(DeadlineExceeded):
        await anext(answers)
    assert loop.time() - began < 90.0
    assert world.made[0].num_open == 1


@in_world
async def test_only_silent_connections_are_dropped(world: World) -> None:
    await world.listening("b")
    caller = world.process("a")
    await caller.ensure_connected("b:7000", 1.0)
    caller.close_silent("b:7000")
    caller.close_silent("c:7000")
    assert caller.num_open == 1
    world.network.pause("b")
    await asyncio.sleep(4.5)
    caller.close_silent("b:7000")
    assert caller.num_open == 0
