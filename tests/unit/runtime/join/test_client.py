"""`join` passes the conformance suite over real sockets and on virtual time, and what it does beyond it."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.unit.runtime.security.certificates import issued_credentials

from kvolt.core.errors import Cancelled, DiscoveryLost, InvalidRequest, KeyConflict, NotFound
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.join import server as join_server
from kvolt.runtime.join.client import JoinDiscovery
from kvolt.runtime.join.server import (
    DELETE,
    HOLD,
    PUT,
    REVOKE,
    WATCH,
    HoldRequest,
    JoinServer,
    KeyRequest,
    PutRequest,
)
from kvolt.runtime.network import Network, SocketNetwork
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import Destination, IncomingStream
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.security.secure_network import SecureNetwork
from kvolt.runtime.tasks import Scope
from kvolt.testing.discovery import suite as discovery_suite
from kvolt.testing.discovery.observer import observing
from kvolt.testing.discovery.suite import CASES, Case, run_case
from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork


@dataclass(frozen=True)
class Times:
    ttl_s: float
    settle_s: float
    grace_s: float
    timeout_s: float
    retry_max_s: float


REAL = Times(ttl_s=2.0, settle_s=6.0, grace_s=4.0, timeout_s=10.0, retry_max_s=0.5)
LASTING = Deadlines(first_s=60.0, between_s=60.0)
USUAL = Times(ttl_s=5.0, settle_s=10.0, grace_s=5.0, timeout_s=5.0, retry_max_s=2.0)


def abort(plane: TcpPlane) -> None:
    for connection in plane.all():
        connection.abort(Cancelled("crashed"))


class Server:
    """The process of a join server."""

    def __init__(
        self, network: Network, store: MemDiscovery | FileDiscovery, clock: Clock, settle_s: float
    ) -> None:
        self.endpoints = EndpointServer()
        self.plane = TcpPlane(network, ConnectionOptions(), "server", self.endpoints.on_open)
        self.store = store
        self.join = JoinServer(self.store, clock, settle_s)
        self.join.register_endpoints(self.endpoints)

    async def kill(self) -> None:
        """Gone without a goodbye."""
        await self.plane.stop_listening()
        abort(self.plane)
        await self.endpoints.close()
        await self.join.close()
        abandoning = self.store.abandon()
        if abandoning is not None:
            await abandoning
        await self.plane.close()


class Client:
    """A process with a join client."""

    def __init__(self, network: Network, address: str, name: str, times: Times) -> None:
        self.plane = TcpPlane(network, ConnectionOptions(), name, EndpointServer().on_open)
        self.states: list[bool] = []
        self.discovery = JoinDiscovery(
            self.plane,
            address,
            random.Random(name),
            times.timeout_s,
            self.states.append,
            retry_max_s=times.retry_max_s,
            grace_s=times.grace_s,
        )

    async def close(self) -> None:
        await self.discovery.close()
        await self.plane.close()

    async def kill(self) -> None:
        abort(self.plane)
        await self.discovery.abandon()
        await self.plane.close()


class Harness:
    """Losing the store is losing its process; it comes back on the same port with nothing in it."""

    def __init__(self, times: Times, clock: Clock) -> None:
        self.times = times
        self.clock = clock
        self.server: Server | None = None
        self.address = "127.0.0.1:0"
        self.clients: dict[Discovery, Client] = {}

    @property
    def ttl_s(self) -> float:
        return self.times.ttl_s

    def network(self, host: str) -> Network:
        return SocketNetwork()

    def store(self) -> MemDiscovery | FileDiscovery:
        return MemDiscovery(MemStore(), self.clock, random.Random(1))

    async def start_server(self) -> None:
        self.server = Server(self.network("server"), self.store(), self.clock, self.times.settle_s)
        self.address = await self.server.plane.listen(self.address)

    async def stop_server(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.kill()

    async def client(self) -> JoinDiscovery:
        if self.address.endswith(":0"):
            await self.start_server()
        name = f"client{len(self.clients)}"
        client = Client(self.network(name), self.address, name, self.times)
        self.clients[client.discovery] = client
        return client.discovery

    async def crash(self, client: Discovery) -> None:
        await self.clients[client].kill()

    async def set_reachable(self, reachable: bool) -> None:
        if reachable:
            await self.start_server()
        else:
            await self.stop_server()

    async def wipe(self) -> None:
        if self.server is not None:
            await self.stop_server()
            await self.start_server()

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await self.stop_server()


class TlsHarness(Harness):
    """The same with a cluster key."""

    def network(self, host: str) -> Network:
        return SecureNetwork(issued_credentials(host))


class VirtualHarness(Harness):
    """The same on a virtual network; with `silent`, a dead process just stops answering."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__(USUAL, VirtualClock())
        self.silent = silent
        self.virtual = VirtualNetwork(random.Random(1))
        self.address = "server:0"

    def network(self, host: str) -> Network:
        return self.virtual.host(host)

    async def start_server(self) -> None:
        self.virtual.host("server")
        self.virtual.restart("server")
        await super().start_server()

    async def stop_server(self) -> None:
        self.virtual.crash("server", self.silent)
        await super().stop_server()

    async def crash(self, client: Discovery) -> None:
        self.virtual.crash(f"client{list(self.clients).index(client)}", self.silent)
        await super().crash(client)

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        await Harness.stop_server(self)
        self.virtual.close()


class PartitionHarness(VirtualHarness):
    """Losing the store is losing the way to it: it lives on, and believes that everybody else is gone."""

    async def set_reachable(self, reachable: bool) -> None:
        change = self.virtual.heal if reachable else self.virtual.partition
        for number in range(len(self.clients)):
            change("server", f"client{number}")


class DirectoryHarness(VirtualHarness):
    """A server over `file`: its contents are still there after a restart, under leases that are not renewed."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.num_starts = 0

    def store(self) -> FileDiscovery:
        self.num_starts += 1
        return FileDiscovery(
            self.directory, self.clock, InlineBlocking(0.001), random.Random(self.num_starts)
        )


LOSSES: dict[str, Callable[[Path], Harness]] = {
    "restart": lambda _: VirtualHarness(),
    "silent": lambda _: VirtualHarness(silent=True),
    "partition": lambda _: PartitionHarness(),
    "directory": DirectoryHarness,
}


@pytest.mark.parametrize("kind", [Harness, TlsHarness])
async def test_conformance_on_real_sockets(kind: type[Harness]) -> None:
    """All cases at once: they wait for leases that outlast a stop of the process."""
    results = await asyncio.gather(
        *(run_case(case, lambda: kind(REAL, SystemClock())) for case in CASES), return_exceptions=True
    )
    failures = {
        discovery_suite.name(case): result
        for case, result in zip(CASES, results, strict=True)
        if result is not None
    }
    assert not failures


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES, ids=discovery_suite.name)
def test_conformance_on_virtual_time(case: Case, loss: str, tmp_path: Path) -> None:
    run_virtual(lambda: run_case(case, lambda: LOSSES[loss](tmp_path)), until_s=900)


# -- the server away


@pytest.mark.parametrize("silent", [False, True])
def test_a_lease_without_a_server_is_refused_in_time(silent: bool) -> None:
    async def main() -> None:
        harness = VirtualHarness(silent)
        client = await harness.client()
        await harness.stop_server()
        with pytest.raises(DiscoveryLost, match=r"cannot connect|did not answer|no answer"):
            await client.lease(USUAL.ttl_s)
        assert harness.clock.monotonic() == pytest.approx(USUAL.timeout_s, abs=0.1)
        await harness.close()

    run_virtual(main, until_s=100)


def test_a_server_that_is_no_join_server_is_named() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        server = TcpPlane(harness.network("other"), ConnectionOptions(), "other", EndpointServer().on_open)
        harness.address = await server.listen("other:7400")
        client = await harness.client()
        for call in (client.lease(1.0), client.get_prefix("")):
            with pytest.raises(DiscoveryLost, match="is not served here"):
                await call
        await client.close()
        await server.close()
        await harness.close()

    run_virtual(main, until_s=100)


@pytest.mark.parametrize(
    "ttl_s", [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e300, 86_401.0, "5", None]
)
def test_an_invalid_ttl_is_refused_without_side_effects(ttl_s: object) -> None:
    async def main() -> None:
        harness = VirtualHarness()
        client = await harness.client()
        plane = harness.clients[client].plane
        within = Deadlines(connect_s=1.0, first_s=1.0, between_s=1.0, total_s=1.0)
        request = {"lease": "odd", "ttl_s": ttl_s}
        stream = await open_stream(
            plane, Destination(harness.address, HOLD), request, within, msgspec.msgpack.decode
        )
        with pytest.raises(InvalidRequest, match="ttl_s"):
            await anext(stream)
        await client.put("a", b"1", await client.lease(USUAL.ttl_s))
        assert await client.get_prefix("") == {"a": b"1"}
        await harness.close()

    run_virtual(main, until_s=100)


@pytest.mark.parametrize("ttl_s", [0.05, 1, 86_400.0])
def test_a_ttl_within_its_bounds_is_taken(ttl_s: float) -> None:
    encoded = msgspec.msgpack.encode(HoldRequest("name", ttl_s))
    assert msgspec.msgpack.decode(encoded, type=HoldRequest) == HoldRequest("name", ttl_s)


def test_a_stalled_server_keeps_the_other_calls_of_its_connection() -> None:
    """A frontend that hosts the join port calls its workers over the connection that they registered through."""

    async def main() -> None:
        harness = VirtualHarness()
        await harness.start_server()
        assert harness.server is not None
        client = harness.clients[discovery := await harness.client()]
        lease = await discovery.lease(5.0)
        await discovery.put("a", b"1", lease)
        served: list[IncomingStream] = []
        harness.server.endpoints.register("ns.c.e", InstanceId("i"), served.append)
        connection = await client.plane.get(harness.address, 1.0)
        answers = await open_stream(client.plane, Destination(harness.address, "ns.c.e"), None, LASTING)
        await asyncio.sleep(0.1)
        harness.virtual.pause("server")
        await asyncio.sleep(5.0)
        assert client.states == [True, False], "discovery itself does not wait for a silent server"
        assert connection.silent
        harness.virtual.resume("server")
        await asyncio.sleep(4.0)
        served[0].send("late")
        served[0].end()
        assert [item async for item in answers] == ["late"]
        assert client.plane.all() == [connection]
        assert client.states == [True, False, True], "it holds its lease again"
        await asyncio.sleep(10.0)
        assert await discovery.get_prefix("") == {"a": b"1"}
        await harness.close()

    run_virtual(main)


@pytest.mark.parametrize("silent", [False, True])
def test_close_does_not_wait_for_a_server_that_is_away(silent: bool) -> None:
    async def main() -> None:
        harness = VirtualHarness(silent)
        client = await harness.client()
        for number in range(5):
            await client.put(f"k/{number}", b"", await client.lease(USUAL.ttl_s))
        async with observing(client, "k/"):
            await harness.stop_server()
            await asyncio.sleep(1.0)
            started = harness.clock.monotonic()
            await client.close()
            assert harness.clock.monotonic() - started <= USUAL.timeout_s
        await harness.close()

    run_virtual(main, until_s=100)


def test_after_a_restart_only_the_dead_are_gone_and_only_when_settled() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        (living, lease), (dying, should_remove) = [
            (client, await client.lease(USUAL.ttl_s))
            for client in (await harness.client(), await harness.client())
        ]
        await living.put("k/lives", b"", lease)
        await dying.put("k/dies", b"", should_remove)
        async with observing(await harness.client(), "k/") as [observer]:
            await harness.stop_server()
            await harness.crash(dying)
            await asyncio.sleep(300)
            restarted_at = harness.clock.monotonic()
            await harness.start_server()
            await asyncio.sleep(USUAL.settle_s - 0.1)
            assert not observer.deletes
            await observer.until_content({"k/lives": b""})
            assert harness.clock.monotonic() - restarted_at == pytest.approx(USUAL.settle_s, abs=0.1)
            await asyncio.sleep(60)
            assert observer.deletes == ["k/dies"]
        await harness.close()

    run_virtual(main, until_s=900)


def test_loss_and_return_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        harness = VirtualHarness()
        client = await harness.client()
        states = harness.clients[client].states
        for _ in range(3):
            await client.lease(USUAL.ttl_s)
        async with observing(client, "a/", "b/"):
            assert states == [True]
            await harness.stop_server()
            await asyncio.sleep(60)
            assert states == [True, False]
            await harness.start_server()
            await asyncio.sleep(60)
            assert states == [True, False, True]
        await harness.close()

    run_virtual(main, until_s=300)
    assert len([record for record in caplog.records if record.name.endswith("store_state")]) == 2


# -- who owns what


def test_a_key_that_another_lease_got_while_the_owner_was_cut_off_is_reported_lost() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        first, second = [await harness.client() for _ in range(2)]
        leases = [await client.lease(USUAL.ttl_s) for client in (first, second)]
        lost: list[str] = []
        await first.put("k", b"first", leases[0], lambda: lost.append("k"))
        harness.virtual.partition("server", "client0")
        await asyncio.sleep(60)  # the lease has expired, and its owner does not know
        await second.put("k", b"second", leases[1])
        assert not lost
        harness.virtual.heal("server", "client0")
        await asyncio.sleep(60)
        assert lost == ["k"]
        assert await second.get_prefix("") == {"k": b"second"}
        with pytest.raises(KeyConflict):
            await first.put("k", b"first", leases[0])
        await second.revoke(leases[1])
        await first.put("k", b"first", leases[0])
        assert await second.get_prefix("") == {"k": b"first"}
        await harness.close()

    run_virtual(main, until_s=900)


def test_after_an_outage_the_first_to_return_keeps_its_key() -> None:
    """The server has lost everything: it cannot know that the key had an owner, who learns of it."""

    async def main() -> None:
        harness = VirtualHarness()
        owner, intruder = [await harness.client() for _ in range(2)]
        leases = [await client.lease(USUAL.ttl_s) for client in (owner, intruder)]
        lost: list[str] = []
        await owner.put("k", b"owner", leases[0], lambda: lost.append("k"))
        harness.virtual.partition("server", "client0")
        await harness.wipe()
        await asyncio.sleep(3)
        await intruder.put("k", b"intruder", leases[1])
        harness.virtual.heal("server", "client0")
        await asyncio.sleep(10)
        assert lost == ["k"]
        await harness.close()

    run_virtual(main, until_s=900)


def test_a_stranger_can_neither_use_nor_end_a_lease() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        owner = await harness.client()
        lease = await owner.lease(USUAL.ttl_s)
        assert len(lease) >= 32  # 128 bits: a secret of its client
        await owner.put("k", b"owner", lease)
        stranger = TcpPlane(harness.network("stranger"), ConnectionOptions(), "x", EndpointServer().on_open)
        for guess in ("", "0" * 16, lease[:-1], lease.upper() + "0"):
            for endpoint, body in ((REVOKE, guess), (DELETE, KeyRequest(guess, "k"))):
                async with await open_stream(
                    stranger,
                    Destination(harness.address, endpoint),
                    body,
                    Deadlines(),
                    msgspec.msgpack.decode,
                ) as stream:
                    assert await anext(stream) is True
            with pytest.raises(NotFound):
                async with await open_stream(
                    stranger,
                    Destination(harness.address, PUT),
                    PutRequest(guess, "k", b"x"),
                    Deadlines(),
                    msgspec.msgpack.decode,
                ) as stream:
                    await anext(stream)
        await asyncio.sleep(3 * USUAL.ttl_s)
        assert await owner.get_prefix("") == {"k": b"owner"}
        await stranger.close()
        await harness.close()

    run_virtual(main, until_s=900)


def test_what_strangers_put_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_server, "MAX_BYTES", 1000)
    monkeypatch.setattr(join_server, "MAX_LEASES", 2)

    async def main() -> None:
        harness = VirtualHarness()
        stranger, owner = await harness.client(), await harness.client()
        lease = await stranger.lease(USUAL.ttl_s)
        for number in range(9):
            await stranger.put(f"{number}", b"x" * 99, lease)
        await stranger.put("8", b"y" * 99, lease)  # in the place of what is there
        with pytest.raises(DiscoveryLost, match="is full"):
            await stranger.put("more", b"x" * 999, lease)
        own = await owner.lease(USUAL.ttl_s)
        with pytest.raises(DiscoveryLost, match="too many leases"):
            await owner.lease(USUAL.ttl_s)
        await stranger.delete("0")
        await owner.put("own", b"x" * 100, own)
        await stranger.revoke(lease)
        assert harness.server is not None
        assert harness.server.join._shares.num_bytes == 103
        await owner.put("own", b"x" * 800, own)
        assert harness.server.join._shares.num_bytes == 803
        await harness.close()

    run_virtual(main, until_s=900)


def test_a_lease_that_no_connection_holds_ends_within_a_minute() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        stranger, reader = [await harness.client() for _ in range(2)]
        lease = await stranger.lease(86_400.0)
        await stranger.put("k", b"", lease)
        await asyncio.sleep(200)
        assert await reader.get_prefix("") == {"k": b""}, "while it is held it stays"
        await harness.crash(stranger)
        await asyncio.sleep(70)
        assert await reader.get_prefix("") == {}
        await harness.close()

    run_virtual(main, until_s=900)


@pytest.mark.parametrize("stays", [True, False], ids=["held", "unheld"])
def test_one_address_cannot_take_all_leases(monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    monkeypatch.setattr(join_server, "MAX_LEASES", 20)

    async def main() -> None:
        harness = VirtualHarness()
        early, stranger, late = [await harness.client() for _ in range(3)]
        own = await early.lease(USUAL.ttl_s)
        await early.put("early", b"", own)
        for _ in range(19):  # one address may have all that is free
            await stranger.lease(86_400.0)
        if stays:
            with pytest.raises(DiscoveryLost, match="too many leases"):
                await stranger.lease(86_400.0)
        else:
            await harness.clients[stranger].kill()
            await asyncio.sleep(1)
            # Another process behind the same address is not kept out by leases of which no connection is left.
            neighbour = Client(harness.network("client1"), harness.address, "neighbour", USUAL)
            await neighbour.discovery.lease(USUAL.ttl_s)
            await neighbour.close()
        for number in range(5):
            await late.put(f"late{number}", b"", await late.lease(USUAL.ttl_s))
        await asyncio.sleep(30)
        assert harness.server is not None
        assert len(harness.server.join._leases) <= 20
        assert sorted(await early.get_prefix("")) == ["early", *(f"late{number}" for number in range(5))]
        await harness.close()

    run_virtual(main, until_s=900)


def test_one_address_cannot_take_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_server, "MAX_BYTES", 10_000)

    async def main() -> None:
        harness = VirtualHarness()
        stranger, owner, reader = [await harness.client() for _ in range(3)]
        for number in range(9):
            await stranger.put(f"{number}", b"x" * 1_000, await stranger.lease(USUAL.ttl_s))
        own = await owner.lease(USUAL.ttl_s)
        for number in range(4):
            await owner.put(f"own{number}", b"x" * 1_000, own)
        with pytest.raises(DiscoveryLost, match="is full"):
            await owner.put("large", b"x" * 9_000, own)
        await asyncio.sleep(30)  # the leases of the stranger come back, and find as much room as there is
        assert harness.server is not None
        assert harness.server.join._shares.num_bytes <= 10_000
        content = await reader.get_prefix("own")
        assert sorted(content) == [f"own{number}" for number in range(4)]
        await harness.close()

    run_virtual(main, until_s=900)


@pytest.mark.parametrize("away_s", [6.0, 14.0, 60.0])
def test_changes_that_were_given_up_leave_nothing_behind(away_s: float) -> None:
    async def main() -> None:
        harness = VirtualHarness()
        owner, reader = [await harness.client() for _ in range(2)]
        lease = await owner.lease(100.0)
        for key in ("changed", "deleted", "kept"):
            await owner.put(key, b"old", lease)
        harness.virtual.partition("server", "client0")
        results = await asyncio.gather(
            owner.put("changed", b"new", lease),
            owner.put("ghost", b"", lease),
            owner.delete("deleted"),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [DiscoveryLost] * 3
        await asyncio.sleep(away_s - USUAL.timeout_s)
        harness.virtual.heal("server", "client0")
        await asyncio.sleep(30)
        assert await reader.get_prefix("") == {"changed": b"old", "kept": b"old"}
        await harness.close()

    run_virtual(main, until_s=900)


def test_a_cancelled_put_is_gone_over() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        owner, reader = [await harness.client() for _ in range(2)]
        lease = await owner.lease(USUAL.ttl_s)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0006):  # the request is there, the answer is on its way
                await owner.put("k", b"", lease)
        assert await reader.get_prefix("") == {"k": b""}
        await asyncio.sleep(1)
        assert await reader.get_prefix("") == {}
        assert harness.clients[owner].states == [True]
        await harness.close()

    run_virtual(main, until_s=100)


def test_one_who_comes_back_wins_time_for_the_others() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        owners = [await harness.client() for _ in range(3)]
        for number, owner in enumerate(owners):
            await owner.put(f"k/{number}", b"", await owner.lease(10.0))
        async with observing(await harness.client(), "k/") as [observer]:
            for number in range(3):
                harness.virtual.cut("server", f"client{number}", silent=False)
                harness.virtual.partition("server", f"client{number}")
            await asyncio.sleep(6)
            harness.virtual.heal("server", "client0")
            await asyncio.sleep(5)
            harness.virtual.heal("server", "client1")
            await observer.until_content({"k/0": b"", "k/1": b""})
            assert harness.clock.monotonic() < 20
            assert observer.deletes == ["k/2"]
        await harness.close()

    run_virtual(main, until_s=900)


def test_a_lost_lease_ends_within_a_minute_whichever_others_return() -> None:
    """First silent, then without its connection, and spared because another one comes back."""

    async def main() -> None:
        harness = VirtualHarness()
        lost, other, reader = [await harness.client() for _ in range(3)]
        await lost.put("lost", b"", await lost.lease(60.0))
        await other.put("other", b"", await other.lease(60.0))
        harness.virtual.cut("server", "client0", silent=True)
        harness.virtual.partition("server", "client0")
        lost_at = harness.clock.monotonic()
        await asyncio.sleep(50)
        harness.virtual.cut("server", "client1", silent=False)
        await asyncio.sleep(5)
        assert set(await reader.get_prefix("")) == {"lost", "other"}
        silence_s = 5.0  # until it is noticed
        await asyncio.sleep(lost_at + silence_s + 60.0 - harness.clock.monotonic())
        assert set(await reader.get_prefix("")) == {"other"}
        await harness.close()

    run_virtual(main, until_s=900)


def test_unread_prefixes_are_not_watched() -> None:
    async def main() -> None:
        harness = VirtualHarness()
        client = await harness.client()
        assert harness.server is not None
        for number in range(10):
            async with observing(client, f"k/{number}"):
                await asyncio.sleep(0.1)
                assert harness.server.endpoints.num_active_streams(WATCH) == 1
            gc.collect()  # a watch is held weakly, and what its reader left may lie in a cycle
        await harness.close()

    run_virtual(main, until_s=100)


# -- everything at once


class Owner:
    """Puts and deletes keys of its own at random, and remembers what the port promised."""

    def __init__(self, client: JoinDiscovery, name: str, rng: random.Random) -> None:
        self.owns = {f"{name}/stays": b"stays"}
        self._client = client
        self._name = name
        self._rng = rng

    async def run(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        lease = await self._client.lease(USUAL.ttl_s)
        await self._client.put(f"{self._name}/stays", b"stays", lease)
        while loop.time() < until:
            await asyncio.sleep(self._rng.expovariate(2.0))
            key = f"{self._name}/{self._rng.randrange(4)}"
            with suppress(DiscoveryLost):
                if self._rng.random() < 0.3:
                    self.owns.pop(key, None)
                    await self._client.delete(key)
                else:
                    value = str(self._rng.random()).encode()
                    await self._client.put(key, value, lease)
                    self.owns[key] = value


async def last_error(harness: VirtualHarness, rng: random.Random, until: float) -> None:
    """Takes the server away, or the way to it, for times within which no lease expires."""
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        await asyncio.sleep(rng.uniform(1, 15))
        harness.silent = rng.random() < 0.5
        if rng.random() < 0.5:
            await harness.stop_server()
            await asyncio.sleep(rng.choice([0.0, 0.5, 30.0]))
            await harness.start_server()
        else:
            host = f"client{rng.randrange(len(harness.clients))}"
            harness.virtual.partition("server", host)
            await asyncio.sleep(rng.uniform(0.1, 4.0))
            harness.virtual.heal("server", host)


@pytest.mark.parametrize("seed", range(8))
def test_after_any_trouble_everybody_sees_what_is_owned(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        harness = VirtualHarness()
        owners = [
            Owner(await harness.client(), f"o{number}", random.Random(f"{seed}/{number}"))
            for number in range(3)
        ]
        async with observing(await harness.client(), "") as [observer]:
            async with Scope("test") as scope:
                for owner in owners:
                    scope.start(owner.run(until=120), "owner")
                scope.start(last_error(harness, rng, until=120), "trouble")
            await asyncio.sleep(60)
            owned = {key: value for owner in owners for key, value in owner.owns.items()}
            assert observer.content == owned
            assert not [key for key in observer.deletes if key.endswith("/stays")]
        late = await harness.client()
        assert await late.get_prefix("") == dict(sorted(owned.items()))
        await harness.close()

    run_virtual(main, until_s=900)
