"""A registration that is refused or lost: reported, not ready, and registered again."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.clock import new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.registration import RegisteredKey
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork


class Lab:
    """A mem store with an owner's key in it, and a process that wants the same key."""

    def __init__(self) -> None:
        self.store = MemStore()
        self.clock = VirtualClock()
        self.other = self.client(1)
        self.own = self.client(2)
        self.task_group = TaskGroup("test")
        self.states: list[str | None] = []

    def client(self, seed: int) -> MemDiscovery:
        return MemDiscovery(self.store, self.clock, random.Random(seed))

    async def registered(self) -> RegisteredKey:
        lease = await self.own.lease(5.0)
        return RegisteredKey(self.own, lease, "k", self.task_group, random.Random(3), self.states.append)

    async def content(self) -> dict[str, bytes]:
        return dict(await self.other.get_prefix(""))

    async def close(self) -> None:
        await self.task_group.close()
        await self.own.close()
        await self.other.close()


def test_a_refused_key_is_registered_once_the_other_lease_has_expired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        lab = Lab()
        crashed = lab.client(4)
        await crashed.put("k", b"old", await crashed.lease(5.0))
        crashed.abandon()
        key = await lab.registered()
        await key.publish(b"new")
        assert len(lab.states) == 1
        assert "another live lease" in str(lab.states[0])
        await key.publish(b"newer")  # what is registered in the end is the latest value
        await asyncio.sleep(5.0 + 3.0)
        assert await lab.content() == {"k": b"newer"}
        assert lab.states[1:] == [None]
        await lab.close()

    with caplog.at_level(logging.WARNING):
        run_virtual(main, until_s=60)
    messages = [record.getMessage() for record in caplog.records if "registration" in record.name]
    assert [message.split(":")[0] for message in messages] == ["registration lost", "registration restored"]


def test_a_lost_key_is_put_again_and_an_outage_is_no_loss() -> None:
    async def main() -> None:
        lab = Lab()
        key = await lab.registered()
        lab.store.offline()
        await key.publish(b"1")
        await asyncio.sleep(10)
        lab.store.online()
        await asyncio.sleep(3)
        assert await lab.content() == {"k": b"1"}
        assert lab.states == []
        await lab.own.delete("k")
        key._on_lost()  # as a store does whose lease expired unnoticed
        assert lab.states == ["another lease acquired the key after this process's lease had expired"]
        await asyncio.sleep(3)
        assert await lab.content() == {"k": b"1"}
        assert lab.states[1:] == [None]
        await lab.close()

    run_virtual(main, until_s=60)


def test_a_withdrawn_key_is_not_put_again() -> None:
    async def main() -> None:
        lab = Lab()
        lease = await lab.other.lease(5.0)
        await lab.other.put("k", b"other", lease)
        key = await lab.registered()
        await key.publish(b"own")
        await key.unregister()
        await lab.other.revoke(lease)
        await asyncio.sleep(10)
        assert await lab.content() == {}
        assert lab.states[1:] == [None]
        lab.store.offline()
        with pytest.raises(DiscoveryLost):
            await key.unregister()
        lab.store.online()
        await lab.close()

    run_virtual(main, until_s=60)


def test_a_process_without_its_registration_is_not_ready() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        store, clock, rng = MemStore(), VirtualClock(), random.Random(7)
        ports = Ports(
            clock,
            rng,
            network.host("worker"),
            InlineBlocking(),
            tcp_plane(network.host("worker")),
            lambda plane: MemDiscovery(store, clock, rng),
            lambda discovery, plane, server: MemEvents(MemBus(), new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions("worker", listen="worker:0"))
        await runtime.start()
        endpoint = EndpointAddress("ns", "worker", "generate")

        async def handler(request: object):  # type: ignore[no-untyped-def]
            yield request

        before = rng.getstate()
        taken_id = new_id(rng)  # the id that the process will draw next
        rng.setstate(before)
        intruder = MemDiscovery(store, clock, random.Random(8))
        lease = await intruder.lease(5.0)
        await intruder.put(f"{endpoint.prefix}{taken_id}", b"x", lease)
        await runtime.serve(endpoint, handler)
        assert not runtime.health.ready()
        [reason] = runtime.health.not_ready().values()
        assert "another live lease" in reason
        await intruder.revoke(lease)
        await asyncio.sleep(3)
        assert runtime.health.ready()
        await runtime.close()
        await intruder.close()
        network.close()

    run_virtual(main, until_s=60)
