"""What each fault of the in-memory network does to both ends, and to those who connect meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvolt.core.errors import ConnectFailed, NotFound
from kvolt.testing.virtual.link import LinkProfile, VirtualTransport
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork


class Recorder(asyncio.Protocol):
    transport: VirtualTransport

    def __init__(self) -> None:
        self.data = b""
        self.paused = False
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, VirtualTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)

    @property
    def was_reset(self) -> bool:
        return len(self.lost) == 1 and isinstance(self.lost[0], ConnectionResetError)


class Cluster:
    """Hosts a and b, b listening on 7000."""

    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(3), profile=LinkProfile(window_bytes=1000))
        self.a = self.network.host("a")
        self.b = self.network.host("b")
        self.accepted: list[Recorder] = []

    def accept(self) -> Recorder:
        self.accepted.append(Recorder())
        return self.accepted[-1]

    async def connect(self, timeout_s: float = 5.0) -> Recorder:
        client = await self.a.connect("b:7000", Recorder, timeout_s)
        assert isinstance(client, Recorder)
        return client

    async def pair(self) -> tuple[Recorder, Recorder]:
        client = await self.connect()
        await asyncio.sleep(0.1)
        return client, self.accepted[-1]


Body = Callable[[Cluster], Coroutine[Any, Any, None]]


def on_cluster(body: Body) -> Callable[[], None]:
    def test() -> None:
        async def main() -> None:
            cluster = Cluster()
            await cluster.b.listen("b:7000", cluster.accept)
            await body(cluster)
            cluster.network.close()

        run_virtual(main)

    test.__name__ = body.__name__
    return test


def now() -> float:
    return asyncio.get_running_loop().time()


@on_cluster
async def test_a_reported_cut_resets_both_ends_and_lets_new_connections_pass(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.cut("a", "b", silent=False)
    await asyncio.sleep(0)
    assert client.was_reset
    assert server.was_reset
    client.transport.write(b"ignored")
    again, peer = await cluster.pair()
    again.transport.write(b"hello")
    await asyncio.sleep(1)
    assert peer.data == b"hello"


@on_cluster
async def test_after_a_silent_cut_bytes_vanish_and_nobody_is_told(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    client.transport.write(b"on the wire")
    cluster.network.cut("a", "b", silent=True)
    client.transport.write(b"x" * 100_000)
    server.transport.write(b"y")
    await asyncio.sleep(3600)
    assert (client.data, server.data, client.lost, server.lost) == (b"", b"", [], [])
    assert client.paused
    # Its owner gave it up: an abort ends it at once, a close when the kernel would.
    begun = now()
    server.transport.close()
    client.transport.close()
    await asyncio.sleep(1)
    assert (server.lost, client.lost) == ([None], [])
    await asyncio.sleep(20)
    assert isinstance(client.lost[0], TimeoutError)
    assert now() - begun == 21


@on_cluster
async def test_a_cut_concerns_only_the_two_hosts(cluster: Cluster) -> None:
    client, _ = await cluster.pair()
    other = await cluster.network.host("c").connect("b:7000", Recorder, 5.0)
    assert isinstance(other, Recorder)
    cluster.network.cut("c", cluster.b, silent=False)
    await asyncio.sleep(1)
    assert other.was_reset
    assert client.lost == []


@on_cluster
async def test_a_short_partition_delays_every_byte_and_loses_none(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    client.transport.write(b"before ")
    cluster.network.partition("a", "b")
    client.transport.write(b"during ")
    server.transport.write(b"answer")
    await asyncio.sleep(14.9)
    assert (server.data, client.data) == (b"", b"")
    cluster.network.slow("a", "b", latency_s=0.5, bytes_per_s=None)
    cluster.network.heal("b", "a")
    client.transport.write(b"after")
    await asyncio.sleep(0.4)
    assert (server.data, client.data) == (b"", b"")
    await asyncio.sleep(0.2)
    assert (server.data, client.data) == (b"before during after", b"answer")
    assert (client.lost, server.lost) == ([], [])


@on_cluster
async def test_a_long_partition_resets_both_ends_when_it_heals(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.partition("a", "b")
    client.transport.write(b"lost")
    await asyncio.sleep(15.1)
    assert (client.lost, server.lost) == ([], [])
    cluster.network.heal("a", "b")
    await asyncio.sleep(1)
    assert client.was_reset
    assert server.was_reset
    assert server.data == b""


@on_cluster
async def test_healing_does_not_report_a_silent_cut(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.cut("a", "b", silent=True)
    cluster.network.partition("a", "b")
    await asyncio.sleep(100)
    cluster.network.heal("a", "b")
    await asyncio.sleep(100)
    assert (client.lost, server.lost) == ([], [])


@on_cluster
async def test_what_arrived_before_a_partition_can_be_read_during_it(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    server.transport.pause_reading()
    client.transport.write(b"arrived")
    await asyncio.sleep(1)
    cluster.network.partition("a", "b")
    client.transport.write(b"held")
    server.transport.resume_reading()
    await asyncio.sleep(1)
    assert server.data == b"arrived"


@on_cluster
async def test_connecting_through_a_partition_times_out_or_waits_for_its_end(cluster: Cluster) -> None:
    cluster.network.partition("a", "b")
    with pytest.raises(ConnectFailed, match="did not answer") as failed:
        await cluster.connect(timeout_s=2.5)
    assert (now(), failed.value.fields["address"]) == (2.5, "b:7000")
    asyncio.get_running_loop().call_later(5, cluster.network.heal, "a", "b")
    await cluster.connect(timeout_s=30)
    assert 7.5 < now() < 15


@on_cluster
async def test_an_answer_lost_in_a_partition_is_asked_for_again(cluster: Cluster) -> None:
    cluster.network.slow("a", "b", latency_s=1.0, bytes_per_s=None)
    loop = asyncio.get_running_loop()
    loop.call_later(1.5, cluster.network.partition, "a", "b")
    loop.call_later(2.5, cluster.network.heal, "a", "b")
    await cluster.connect(timeout_s=10)
    assert now() == 5.0


@on_cluster
async def test_slow_changes_the_links_that_exist(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.slow("a", "b", latency_s=2.0, bytes_per_s=100.0)
    client.transport.write(b"x" * 300)
    await asyncio.sleep(4.9)
    assert server.data == b""
    await asyncio.sleep(0.2)
    assert len(server.data) == 300


@on_cluster
async def test_a_paused_host_reads_nothing_and_its_peers_fill_up(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.pause("b")
    client.transport.write(b"x" * 100_000)
    server.transport.write(b"stays")
    await asyncio.sleep(100)
    assert (server.data, client.data, client.paused) == (b"", b"", True)
    assert client.transport.get_write_buffer_size() == 99_000
    late = await cluster.connect()  # the kernel still accepts
    late.transport.write(b"late")
    await asyncio.sleep(1)
    assert len(cluster.accepted) == 1
    cluster.network.resume("b")
    await asyncio.sleep(1)
    assert (len(server.data), client.data, client.paused) == (100_000, b"stays", False)
    assert cluster.accepted[1].data == b"late"


@on_cluster
async def test_a_paused_host_learns_of_its_losses_when_it_resumes(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    other, other_server = await cluster.pair()
    cluster.network.pause("b")
    other_server.transport.abort()
    cluster.network.cut("a", "b", silent=False)
    await asyncio.sleep(1)
    assert client.was_reset
    assert other.was_reset
    assert (server.lost, other_server.lost) == ([], [])
    cluster.network.resume("b")
    await asyncio.sleep(1)
    assert server.was_reset


@on_cluster
async def test_an_abort_of_a_paused_host_leaves_it_only_after_resume(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    cluster.network.pause("b")
    server.transport.abort()
    await asyncio.sleep(1)
    assert client.lost == []
    cluster.network.resume("b")
    await asyncio.sleep(1)
    assert client.was_reset
    assert server.lost == [None]


@on_cluster
async def test_a_crash_resets_the_peers_and_refuses_connections(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    server.transport.write(b"last words")
    cluster.network.crash("b", silent=False)
    server.transport.write(b"from beyond")
    await asyncio.sleep(1)
    assert server.was_reset
    assert (client.data, client.was_reset) == (b"last words", True)
    assert not cluster.b.alive
    begun = now()
    with pytest.raises(ConnectFailed, match="refused"):
        await cluster.connect()
    assert now() - begun < 0.1
    with pytest.raises(ConnectFailed):
        await cluster.b.connect("a:1", Recorder, 5.0)


@on_cluster
async def test_a_silent_crash_tells_nobody_and_connections_time_out(cluster: Cluster) -> None:
    client, server = await cluster.pair()
    server.transport.write(b"on the wire")
    cluster.network.crash("b", silent=True)
    await asyncio.sleep(100)
    assert server.was_reset
    assert (client.data, client.lost) == (b"", [])
    begun = now()
    with pytest.raises(ConnectFailed, match="did not answer"):
        await cluster.connect(timeout_s=3.0)
    assert now() - begun == 3.0
    client.transport.close()
    await asyncio.sleep(0)
    assert client.lost == [None]


@on_cluster
async def test_a_restarted_host_has_its_ports_free(cluster: Cluster) -> None:
    cluster.network.crash("b", silent=True)
    cluster.network.restart("b")
    assert cluster.b.alive
    with pytest.raises(ConnectFailed, match="refused"):
        await cluster.connect()
    await cluster.b.listen("b:7000", cluster.accept)
    client, server = await cluster.pair()
    client.transport.write(b"hello")
    await asyncio.sleep(1)
    assert server.data == b"hello"


@on_cluster
async def test_a_host_that_crashes_while_it_connects_does_not_get_the_connection(cluster: Cluster) -> None:
    cluster.network.slow("a", "b", latency_s=1.0, bytes_per_s=None)
    loop = asyncio.get_running_loop()
    loop.call_later(0.5, cluster.network.crash, "a", False)
    loop.call_later(0.6, cluster.network.restart, "a")
    with pytest.raises(ConnectFailed):
        await cluster.connect()
    assert cluster.accepted == []


@on_cluster
async def test_a_fault_on_an_unknown_host_is_refused(cluster: Cluster) -> None:
    with pytest.raises(NotFound):
        cluster.network.partition("a", "typo")


def test_without_close_an_undelivered_byte_is_a_leak() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        await network.host("b").listen("b:7000", Recorder)
        client = await network.host("a").connect("b:7000", Recorder, 5.0)
        assert isinstance(client, Recorder)
        client.transport.write(b"x")

    with pytest.raises(AssertionError, match=r"timer at .*_arrive"):
        run_virtual(main)
