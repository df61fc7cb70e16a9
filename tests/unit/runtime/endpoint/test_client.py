"""EndpointClient in isolation: discovery, failures, and selection of instances."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvolt.core.endpoints import EndpointAddress, Instance, InstanceState, encode_instance
from kvolt.core.errors import ConnectFailed, InvalidRequest, KvoltError, Unavailable, WorkerLost
from kvolt.core.ids import InstanceId
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream, open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.connection import Connection, ConnectionOptions
from kvolt.runtime.plane.port import Destination, IncomingStream
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.loop import VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

ENDPOINT = EndpointAddress("ns", "worker", "generate")
LIMITS = Deadlines(connect_s=2.0)


class World:
    """Servers that answer with their name and the target, one calling process, one discovery."""

    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(1))
        self.rng = random.Random(2)
        self.store = MemStore()
        self.discovery = MemDiscovery(self.store, VirtualClock(), self.rng)
        self.lease: LeaseId | None = None
        self.targets: list[str] = []
        self.caller = self._process("caller")
        self._made: list[TcpPlane] = [self.caller]
        self._clients: list[EndpointClient] = []

    def _process(self, name: str) -> TcpPlane:
        def serve(stream: IncomingStream) -> None:
            self.targets.append(stream.target)
            for item in (name, 1, 2):
                stream.send(item)
            stream.end()

        options = ConnectionOptions(limits=SessionLimits(window_items=2))
        return TcpPlane(self.network.host(name), options, name, serve)

    async def server(self, name: str) -> TcpPlane:
        made = self._process(name)
        self._made.append(made)
        await made.listen(f"{name}:7000")
        return made

    async def register(self, name: str, state: InstanceState = InstanceState.READY) -> Instance:
        instance = Instance(id=InstanceId(name), endpoint=ENDPOINT, address=f"{name}:7000", state=state)
        await self.put(instance.key, encode_instance(instance))
        return instance

    async def put(self, key: str, value: bytes) -> None:
        if self.lease is None:
            self.lease = await self.discovery.lease(5.0)
        await self.discovery.put(key, value, self.lease)
        await asyncio.sleep(0.01)

    async def client(self, static: tuple[str, ...] = ()) -> EndpointClient:
        client = EndpointClient(
            ENDPOINT, self.caller, self.rng, None if static else self.discovery, static, LIMITS
        )
        self._clients.append(client)
        await client.start()
        await client.wait_synced(1.0)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.discovery.close()
        for made in self._made:
            await made.close()
        self.network.close()


def in_world(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        world = World()
        try:
            await test(world)
        finally:
            await world.close()

    def run() -> None:
        run_virtual(main)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def ask(client: EndpointClient, instance: Instance | None = None) -> list[Any]:
    return [item async for item in await client.stream(None, instance=instance)]


@in_world
async def test_instances_are_in_order_of_id(world: World) -> None:
    client = await world.client()
    for name in ("c", "a", "b"):
        await world.register(name)
    assert [instance.id for instance in client.instances()] == ["a", "b", "c"]
    await world.discovery.delete(ENDPOINT.prefix + "b")
    await asyncio.sleep(0.01)
    assert [instance.id for instance in client.candidates()] == ["a", "c"]


@in_world
async def test_only_the_ready_are_candidates(world: World) -> None:
    client = await world.client()
    changes: list[list[str]] = []
    client.on_change(lambda: changes.append([instance.id for instance in client.candidates()]))
    await world.register("a")
    await world.register("a", InstanceState.CORDONED)
    await world.register("a", InstanceState.DRAINING)
    await world.register("a")
    assert changes == [["a"], [], [], ["a"]]


@in_world
async def test_what_is_no_instance_is_ignored(world: World) -> None:
    client = await world.client()
    for number, value in enumerate((b"", b"\xc1", b"\x81\xa1z" + b"\x91" * 5000, b"\x81\xa2id\xa2\xff\xff")):
        await world.put(f"{ENDPOINT.prefix}bad{number}", value)
    await world.register("good")
    assert [instance.id for instance in client.instances()] == ["good"], "and the watch goes on"


@in_world
async def test_a_target_names_the_instance(world: World) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    assert await ask(client) == ["a", 1, 2]
    assert await ask(client, instance) == ["a", 1, 2]
    assert world.targets == ["ns.worker.generate#a"] * 2


@in_world
async def test_static_addresses_need_no_discovery(world: World) -> None:
    await world.server("a")
    await world.server("b")
    client = await world.client(static=("a:7000", "b:7000"))
    assert sorted([(await ask(client))[0] for _ in range(4)]) == ["a", "a", "b", "b"]
    assert set(world.targets) == {"ns.worker.generate"}, "whatever instance is there"


@in_world
async def test_no_candidates(world: World) -> None:
    client = await world.client()
    with pytest.raises(Unavailable) as caught:
        client.pick_round_robin()
    assert caught.value.fields["reason"] == "no_instances"
    await world.register("a", InstanceState.CORDONED)
    with pytest.raises(Unavailable) as caught:
        client.pick_round_robin()
    assert caught.value.fields["reason"] == "none_reachable"
    with pytest.raises(Unavailable) as caught:
        client.get_instance(InstanceId("zz"))
    assert caught.value.fields["reason"] == "unknown_instance"
    assert client.get_instance(InstanceId("a")).id == "a"


@in_world
async def test_who_cannot_be_reached_is_out_at_once_and_back_later(world: World) -> None:
    await world.register("a")
    client = await world.client()
    world.network.host("a")
    with pytest.raises(ConnectFailed):
        await client.stream(None)
    assert client.candidates() == []
    assert [instance.id for instance in client.instances()] == ["a"]
    await asyncio.sleep(5)
    assert client.candidates() == []
    await world.server("a")
    await asyncio.sleep(3)
    assert [instance.id for instance in client.candidates()] == ["a"]
    assert world.targets == [], "no request was spent on finding out"
    assert await ask(client) == ["a", 1, 2]


@in_world
async def test_a_lost_instance_that_leaves_discovery_is_forgotten(world: World) -> None:
    await world.register("a")
    client = await world.client()
    world.network.host("a")
    with pytest.raises(ConnectFailed):
        await client.stream(None)
    await world.discovery.delete(ENDPOINT.prefix + "a")
    await asyncio.sleep(10)
    attempts = world.caller.stats.connects["connect_failed"]
    await asyncio.sleep(30)
    assert world.caller.stats.connects["connect_failed"] == attempts, "it is not dialed any more"
    await world.register("a")
    assert [instance.id for instance in client.candidates()] == ["a"], "it starts anew"


@in_world
async def test_a_lost_connection_takes_all_instances_behind_it(world: World) -> None:
    await world.server("a")
    client = await world.client()
    for number in range(3):
        instance = Instance(id=InstanceId(str(number)), endpoint=ENDPOINT, address="a:7000")
        await world.put(instance.key, encode_instance(instance))
    await ask(client)
    world.network.cut("caller", "a", silent=False)
    await asyncio.sleep(0.01)
    assert client.candidates() == []
    await asyncio.sleep(2)
    assert len(client.candidates()) == 3


@in_world
async def test_a_stream_that_ends_with_an_error_is_no_loss(world: World) -> None:
    server = await world.server("a")
    await world.register("a")
    client = await world.client()
    server.go_away()
    with pytest.raises(Unavailable):
        await ask(client)
    assert len(client.candidates()) == 1


@in_world
async def test_a_connection_that_closes_while_the_caller_wakes_up(world: World) -> None:
    """Between the dial's success and the caller's turn: an error at once, not at the first deadline."""
    await world.server("a")
    await world.register("a")
    client = await world.client()
    get = world.caller.get

    async def get_then_lose(address: str, timeout_s: float) -> Connection:
        connection = await get(address, timeout_s)
        connection.abort(WorkerLost("gone"))
        return connection

    world.caller.get = get_then_lose  # type: ignore[method-assign]
    began = asyncio.get_running_loop().time()
    with pytest.raises(ConnectFailed):
        await client.stream(None)
    assert asyncio.get_running_loop().time() - began < 1.0
    world.caller.get = get  # type: ignore[method-assign]


@in_world
async def test_a_sink_needs_no_reader(world: World) -> None:
    """Three items through a window of two: the credit goes back by itself."""
    await world.server("a")
    await world.register("a")
    client = await world.client()
    items: list[Any] = []
    ends: list[KvoltError | None] = []

    class Sink:
        def on_item(self, item: Any) -> None:
            items.append(item)

        def on_end(self, error: KvoltError | None) -> None:
            ends.append(error)

    call = await client.call(None, Sink())
    await asyncio.sleep(0.1)
    assert (items, ends, call.ended) == (["a", 1, 2], [None], True)


@in_world
async def test_a_failed_call_tells_its_sink_nothing(world: World) -> None:
    await world.register("a")
    client = await world.client()
    told: list[Any] = []

    class Sink:
        def on_item(self, item: Any) -> None:
            told.append(item)

        def on_end(self, error: KvoltError | None) -> None:
            told.append(error)

    with pytest.raises(ConnectFailed):
        await client.call(None, Sink(), deadlines=Deadlines(connect_s=0.5, first_s=0.1))
    await asyncio.sleep(1)
    assert told == []


@in_world
async def test_a_request_that_cannot_be_encoded(world: World) -> None:
    await world.server("a")
    await world.register("a")
    client = await world.client()
    with pytest.raises(InvalidRequest):
        await client.stream(object())
    assert len(client.candidates()) == 1


@in_world
async def test_a_process_can_be_called_directly(world: World) -> None:
    await world.server("a")
    stream = await open_stream(world.caller, Destination("a:7000", "kvolt.process.status"), None, LIMITS)
    assert [item async for item in stream] == ["a", 1, 2]
    assert world.targets == ["kvolt.process.status"]


@in_world
async def test_unreachable_discovery_does_not_stop_a_client(world: World) -> None:
    world.store.offline()
    began = asyncio.get_running_loop().time()
    client = await world.client()
    assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.1)
    assert client.candidates() == []
    world.store.online()
    await world.server("a")
    await world.register("a")
    await asyncio.sleep(1)
    assert await ask(client) == ["a", 1, 2]


@in_world
async def test_close_ends_the_watching_not_the_calls(world: World) -> None:
    await world.server("a")
    await world.register("a")
    client = await world.client()
    stream = await client.stream(None)
    assert await anext(stream) == "a"
    await client.close()
    assert [item async for item in stream] == [1, 2]
    world.network.cut("caller", "a", silent=False)
    await asyncio.sleep(5)


# --- silent instances


async def lasting(client: EndpointClient, instance: Instance) -> ResponseStream:
    """A call that has begun and does not end: its window is not read further."""
    stream = await client.stream(None, instance=instance)
    assert await anext(stream) == str(instance.id)
    return stream


@in_world
async def test_a_silent_instance_is_awaited_while_its_calls_go_on(world: World) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    stream = await lasting(client, instance)
    changes: list[int] = []
    client.on_change(lambda: changes.append(len(client.candidates())))
    world.network.pause("a")
    await asyncio.sleep(20.0)
    assert client.candidates() == []
    assert client.recovering() == {"a"}
    assert world.caller.gauges().num_calls == 1
    world.network.resume("a")
    await asyncio.sleep(0.01)
    assert client.candidates() == [instance], "at once: no dial is waited for"
    assert changes == [0, 1]
    assert client.recovering() == frozenset()
    assert [item async for item in stream] == [1, 2]
    assert world.caller.gauges().num_open == 1


@in_world
async def test_calls_to_a_silent_instance_end_when_another_comes(world: World) -> None:
    """Not in the same instant: those that stall together come back one after the other."""
    for name in "ab":
        await world.server(name)
    instance = await world.register("a")
    client = await world.client()
    await lasting(client, instance)
    world.network.pause("a")
    await asyncio.sleep(10.0)
    await world.register("b")
    await asyncio.sleep(0.8)
    assert world.caller.gauges().num_calls == 1
    await asyncio.sleep(0.4)
    assert world.caller.gauges().num_calls == 0
    assert [each.id for each in client.candidates()] == ["b"]
    assert client.recovering() == {"a"}


@pytest.mark.parametrize("tenths", range(20))
def test_calls_do_not_move_between_instances_that_stall_together(tenths: int) -> None:
    """Their connections beat at other times, so that one falls silent up to 3 s before the other."""

    @in_world
    async def scenario(world: World) -> None:
        client = await world.client()
        for name in "ab":
            await world.server(name)
            await lasting(client, await world.register(name))
            await asyncio.sleep(tenths / 10)
        await asyncio.sleep(1.05)
        connections = world.caller.all()
        for name in "ab":
            world.network.pause(name)
        await asyncio.sleep(8.0)
        assert client.candidates() == []
        assert [each.closed for each in connections] == [None, None]
        for name in "ab":
            world.network.resume(name)
        await asyncio.sleep(0.1)
        assert len(client.candidates()) == 2
        assert [each.closed for each in connections] == [None, None]

    scenario()


@in_world
async def test_calls_move_once_another_instance_is_heard_again(world: World) -> None:
    client = await world.client()
    instances = []
    for name in "ab":
        await world.server(name)
        instances.append(await world.register(name))
        await lasting(client, instances[-1])
        await asyncio.sleep(0.5)
    silent, other = world.caller.all()
    world.network.pause("a")
    await asyncio.sleep(1.5)
    world.network.pause("b")
    while client.candidates() != instances[1:]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.05)  # its calls would be taken over by now
    assert silent.closed is None
    assert client.candidates() == instances[1:], "nothing is known of the other's stall yet"
    world.network.resume("b")
    await asyncio.sleep(1.1)
    assert isinstance(silent.closed, WorkerLost)
    assert other.closed is None


@in_world
async def test_calls_that_cannot_move_are_kept_for_the_whole_grace(world: World) -> None:
    for name in "ab":
        await world.server(name)
    instance = await world.register("a")
    await world.register("b")
    client = await world.client()
    client.may_migrate = False
    stream = await lasting(client, instance)
    world.network.pause("a")
    await asyncio.sleep(25.0)
    assert [each.id for each in client.candidates()] == ["b"]
    world.network.resume("a")
    assert [item async for item in stream] == [1, 2]


@in_world
async def test_calls_to_a_silent_instance_end_where_there_is_a_fallback(world: World) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    client.has_fallback = True
    stream = await lasting(client, instance)
    world.network.pause("a")
    await asyncio.sleep(5.5)
    with pytest.raises(WorkerLost, match="may be stalled or unreachable"):
        _ = [item async for item in stream]


@in_world
async def test_an_instance_whose_lease_ends_in_a_stall_is_awaited(world: World) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    stream = await lasting(client, instance)
    world.network.pause("a")
    await asyncio.sleep(6.0)
    await world.discovery.delete(instance.key)
    await asyncio.sleep(1.0)
    assert client.instances() == []
    assert client.recovering() == {"a"}
    world.network.resume("a")
    await asyncio.sleep(1.0)
    assert client.recovering() == {"a"}, "it answers, and will register again"
    await world.register("a")
    assert client.candidates() == [instance]
    assert client.recovering() == frozenset()
    assert [item async for item in stream] == [1, 2]


@in_world
async def test_an_instance_that_does_not_register_again_is_awaited_no_longer(world: World) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    await ask(client, instance)
    for returns in (True, False):
        world.network.pause("a")
        await asyncio.sleep(6.0)
        await world.discovery.delete(instance.key)
        await asyncio.sleep(1.0)
        assert client.recovering() == {"a"}
        if returns:
            world.network.resume("a")
            await asyncio.sleep(5.5)
        else:
            world.network.crash("a", silent=False)
            await asyncio.sleep(0.1)
        assert client.recovering() == frozenset()
        await world.register("a")


@in_world
async def test_an_instance_whose_lease_ends_before_its_silence_is_noticed_is_awaited(world: World) -> None:
    """As a client hears it that was stalled itself: first of the lease, later of the silence."""
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    stream = await lasting(client, instance)
    world.network.pause("a")
    await world.discovery.delete(instance.key)
    for _ in range(20):
        await asyncio.sleep(1.0)
        assert client.recovering() == {"a"}
    world.network.resume("a")
    await asyncio.sleep(1.0)
    await world.register("a")
    assert client.candidates() == [instance]
    assert [item async for item in stream] == [1, 2]


@pytest.mark.parametrize("is_dialed", [False, True])
def test_a_stalled_instance_without_a_connection_is_awaited(is_dialed: bool) -> None:
    """Its system accepts connections, or drops packets, but nothing refuses them."""

    @in_world
    async def scenario(world: World) -> None:
        await world.server("a")
        instance = await world.register("a")
        client = await world.client()
        world.network.pause("a")
        if is_dialed:
            with pytest.raises(ConnectFailed):
                await client.stream(None)
        await world.discovery.delete(instance.key)
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert client.instances() == []
            assert client.recovering() == {"a"}
        world.network.resume("a")
        await asyncio.sleep(2.0)
        assert client.recovering() == {"a"}, "it answers, and will register again"
        await world.register("a")
        assert await ask(client) == ["a", 1, 2]
        assert client.recovering() == frozenset()

    scenario()


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_absent_instance_is_awaited_until_it_refuses_or_the_grace_is_over(is_refused: bool) -> None:
    @in_world
    async def scenario(world: World) -> None:
        await world.server("a")
        client = await world.client()
        instance = await world.register("a")
        world.network.pause("a")
        await world.discovery.delete(instance.key)
        await asyncio.sleep(10.0)
        assert client.recovering() == {"a"}
        if is_refused:
            world.network.crash("a", silent=False)
            await asyncio.sleep(5.0)
        else:
            await asyncio.sleep(client.stall_grace_s - 11.0)
            assert client.recovering() == {"a"}
            await asyncio.sleep(2.0)
        assert client.recovering() == frozenset()
        await asyncio.sleep(5.0)
        attempts = world.caller.stats.connects["connect_failed"]
        await asyncio.sleep(30.0)
        assert world.caller.stats.connects["connect_failed"] == attempts, "it is not dialed any more"

    scenario()


@in_world
async def test_calls_move_from_an_instance_whose_lease_ends_before_its_silence_is_noticed(
    world: World,
) -> None:
    for name in "ab":
        await world.server(name)
    instance = await world.register("a")
    await world.register("b")
    client = await world.client()
    await lasting(client, instance)
    world.network.pause("a")
    await world.discovery.delete(instance.key)
    await asyncio.sleep(6.0)
    assert world.caller.gauges().num_calls == 0
    assert client.recovering() == frozenset(), "its connection is given up"


@in_world
async def test_an_instance_that_goes_is_awaited_for_no_longer_than_it_takes_to_notice_a_stall(
    world: World,
) -> None:
    await world.server("a")
    instance = await world.register("a")
    client = await world.client()
    await ask(client, instance)
    await world.discovery.delete(instance.key)
    await asyncio.sleep(0.1)
    assert client.recovering() == {"a"}
    await client.wait_change(30.0)
    assert asyncio.get_running_loop().time() < 8.0, "who waits hears of it"
    assert client.recovering() == frozenset()


@in_world
async def test_an_instance_that_drains_and_one_that_is_lost_are_not_awaited(world: World) -> None:
    await world.server("a")
    client = await world.client()
    draining = await world.register("a", state=InstanceState.DRAINING)
    await world.discovery.delete(draining.key)
    await asyncio.sleep(0.1)
    assert client.recovering() == frozenset()
    instance = await world.register("a")
    await ask(client, instance)
    await world.discovery.delete(instance.key)
    await asyncio.sleep(0.1)
    assert client.recovering() == {"a"}
    world.network.crash("a", silent=False)
    await asyncio.sleep(0.1)
    assert client.recovering() == frozenset()


@in_world
async def test_the_last_instance_that_is_lost_may_be_replaced(world: World) -> None:
    client = await world.client()
    assert not client.awaits_replacement
    first, last = await world.register("a"), await world.register("b")
    await world.discovery.delete(first.key)
    await asyncio.sleep(0.1)
    assert not client.awaits_replacement
    await world.discovery.delete(last.key)
    await asyncio.sleep(0.1)
    assert client.awaits_replacement
    await asyncio.sleep(client.stall_grace_s)
    assert not client.awaits_replacement
    await world.register("c")
    assert not client.awaits_replacement


@in_world
async def test_waiting_for_a_change(world: World) -> None:
    await world.server("a")
    client = await world.client()
    loop = asyncio.get_running_loop()
    await client.wait_change(2.0)
    assert loop.time() == pytest.approx(2.0, abs=0.1)
    task_group = TaskGroup("waiting")
    waiting = task_group.start(client.wait_change(50.0), "wait")
    await asyncio.sleep(1.0)
    await world.register("a")
    await waiting
    assert loop.time() == pytest.approx(3.0, abs=0.1)
    await task_group.close()
