"""The in-memory network without faults: addresses, stream integrity, timing, back-pressure, the end."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.testing.virtual.link import LinkProfile, VirtualTransport
from kvolt.testing.virtual.loop import Unhandled, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess


class Recorder(asyncio.Protocol):
    """Keeps all that happens to it; closes at the peer's end unless told to stay half open."""

    transport: VirtualTransport

    def __init__(self, half_open: bool = False) -> None:
        self.chunks: list[bytes] = []
        self.times: list[float] = []
        self.events: list[str] = []
        self.half_open = half_open
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, VirtualTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert data
        self.chunks.append(data)
        self.times.append(asyncio.get_running_loop().time())

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.half_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        assert not self.ended.done(), "told twice"
        self.ended.set_result(error)


class Pair:
    """A connection from host a to host b."""

    def __init__(self, network: VirtualNetwork, client: Recorder, server: Recorder) -> None:
        self.network = network
        self.client = client
        self.server = server


def run_pair(
    body: Callable[[Pair], Awaitable[None]],
    profile: LinkProfile | None = None,
    seed: int = 1,
    half_open: bool = False,
) -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(seed), profile=profile)
        accepted: asyncio.Future[Recorder] = asyncio.get_running_loop().create_future()

        def accept() -> Recorder:
            accepted.set_result(Recorder(half_open))
            return accepted.result()

        await network.host("b").listen("b:7000", accept)
        client = await network.host("a").connect("b:7000", Recorder, 5.0)
        assert isinstance(client, Recorder)
        await body(Pair(network, client, await accepted))
        network.close()

    run_virtual(main)


def test_addresses_and_extra_info() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        host = network.host("b")
        first = await host.listen("b:0", Recorder)
        second = await host.listen("0.0.0.0:0", Recorder)
        assert (first.address, second.address) == ("b:49152", "b:49153")
        client = await network.host("a").connect(first.address, Recorder, 1.0)
        assert isinstance(client, Recorder)
        assert client.transport.get_extra_info("peername") == ("b", 49152)
        assert client.transport.get_extra_info("sockname") == ("a", 49152)
        assert client.transport.get_extra_info("socket") is None
        network.close()

    run_virtual(main)


def test_closing_a_listener_keeps_what_was_accepted_and_resets_what_was_not() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        listener = await network.host("b").listen("b:7000", Recorder)
        accepted = await network.host("a").connect("b:7000", Recorder, 1.0)
        await asyncio.sleep(1)
        waiting = await network.host("a").connect("b:7000", Recorder, 1.0)
        assert isinstance(accepted, Recorder)
        assert isinstance(waiting, Recorder)
        await listener.close()
        assert isinstance(await waiting.ended, ConnectionResetError)
        assert not accepted.transport.is_closing()
        with pytest.raises(ConnectFailed):
            await network.host("a").connect("b:7000", Recorder, 1.0)
        network.close()

    run_virtual(main)


def test_a_taken_port_and_a_foreign_address_are_config_errors() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        host = network.host("b")
        listener = await host.listen("b:7000", Recorder)
        with pytest.raises(ConfigError) as taken:
            await host.listen("b:7000", Recorder)
        assert taken.value.fields["key"] == "port"
        with pytest.raises(ConfigError) as foreign:
            await host.listen("c:7000", Recorder)
        assert foreign.value.fields["key"] == "host"
        await listener.close()
        await host.listen("b:7000", Recorder)
        network.close()

    run_virtual(main)


def test_connect_takes_a_round_trip_and_a_refusal_does_too() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1), profile=LinkProfile(latency_s=0.25))
        loop = asyncio.get_running_loop()
        await network.host("b").listen("b:7000", Recorder)
        await network.host("a").connect("b:7000", Recorder, 5.0)
        assert loop.time() == 0.5
        with pytest.raises(ConnectFailed, match="refused") as refused:
            await network.host("a").connect("b:7001", Recorder, 5.0)
        assert refused.value.fields["address"] == "b:7001"
        assert loop.time() == 1.0
        with pytest.raises(ConnectFailed, match="unknown host"):
            await network.host("a").connect("nowhere:1", Recorder, 5.0)
        network.close()

    run_virtual(main)


@pytest.mark.parametrize("address", ["", "b", "b:", ":7000", "b:seven", "b:65536"])
def test_who_registered_nonsense_cannot_be_connected(address: str) -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        with pytest.raises(ConnectFailed, match="is not an address") as failed:
            await network.host("a").connect(address, Recorder, 5.0)
        assert failed.value.fields["address"] == address

    run_virtual(main)


def test_delivery_takes_serialisation_plus_latency() -> None:
    async def body(pair: Pair) -> None:
        begun = asyncio.get_running_loop().time()
        pair.client.transport.write(b"x" * 1000)
        pair.client.transport.writelines([b"y" * 200, b"z" * 300])
        await asyncio.sleep(5)
        assert [len(chunk) for chunk in pair.server.chunks] == [1000, 500]
        assert [time - begun for time in pair.server.times] == pytest.approx([2.0, 2.5])

    run_pair(body, LinkProfile(latency_s=1.0, bytes_per_s=1000.0))


def test_a_long_write_uses_the_whole_bandwidth() -> None:
    async def body(pair: Pair) -> None:
        begun = asyncio.get_running_loop().time()
        pair.client.transport.write(bytes(10_000_000))
        pair.client.transport.close()
        await pair.server.ended
        assert len(pair.server.data) == 10_000_000
        assert asyncio.get_running_loop().time() - begun == pytest.approx(10.0, rel=0.01)

    run_pair(body, LinkProfile(latency_s=0.001, bytes_per_s=1e6))


def test_order_is_kept_although_jitter_is_larger_than_the_gap() -> None:
    async def body(pair: Pair) -> None:
        for number in range(200):
            pair.client.transport.write(bytes([number]))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        assert pair.server.data == bytes(range(200))
        assert pair.server.times == sorted(pair.server.times)

    run_pair(body, LinkProfile(jitter_s=0.05))


writes = st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    writes=writes,
    gaps=st.lists(st.sampled_from((0.0, 0.0001, 0.01)), min_size=20, max_size=20),
    pauses=st.booleans(),
    window_bytes=st.sampled_from((1, 100, 5000)),
    bytes_per_s=st.sampled_from((None, 1e4, 1e6)),
    seed=st.integers(0, 2**16),
)
def test_the_byte_stream_arrives_whole_whatever_the_pieces(
    writes: list[bytes],
    gaps: list[float],
    pauses: bool,
    window_bytes: int,
    bytes_per_s: float | None,
    seed: int,
) -> None:
    async def body(pair: Pair) -> None:
        for number, data in enumerate(writes):
            pair.client.transport.write(data)
            pair.server.transport.write(data[::-1])
            if pauses and number % 3 == 0:
                pair.server.transport.pause_reading()
            await asyncio.sleep(gaps[number])
            pair.server.transport.resume_reading()
        pair.client.transport.write_eof()
        await pair.server.ended
        await pair.client.ended
        assert pair.server.data == b"".join(writes)
        assert pair.client.data == b"".join(data[::-1] for data in writes)

    profile = LinkProfile(
        jitter_s=0.002, bytes_per_s=bytes_per_s, window_bytes=window_bytes, rechunk=True, latency_s=0.001
    )
    run_pair(body, profile, seed)


def test_rechunk_both_cuts_and_joins() -> None:
    async def body(pair: Pair) -> None:
        for _ in range(100):
            pair.client.transport.write(b"0123456789")
        await asyncio.sleep(1)
        sizes = [len(chunk) for chunk in pair.server.chunks]
        assert sum(sizes) == 1000
        assert min(sizes) < 10 < max(sizes)

    run_pair(body, LinkProfile(jitter_s=0.001, rechunk=True))


def test_no_byte_arrives_before_its_latency_although_joined_with_earlier_ones() -> None:
    async def body(pair: Pair) -> None:
        begun = asyncio.get_running_loop().time()
        for _ in range(50):
            pair.client.transport.write(b"0123456789")
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        arrived = 0
        for chunk, time in zip(pair.server.chunks, pair.server.times, strict=True):
            arrived += len(chunk)
            written_at = begun + 0.1 * ((arrived - 1) // 10)
            assert time >= written_at + 1.0 - 1e-9
        assert arrived == 500

    run_pair(body, LinkProfile(latency_s=1.0, rechunk=True))


def test_a_slow_reader_pauses_the_writer_and_frees_it_again() -> None:
    async def body(pair: Pair) -> None:
        client, server = pair.client, pair.server
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        client.transport.set_write_buffer_limits(high=1000, low=100)
        assert client.transport.get_write_buffer_limits() == (100, 1000)
        client.transport.write(b"w" * 4096)
        assert client.transport.get_write_buffer_size() == 0
        client.transport.write(b"u" * 1000)
        assert (client.transport.get_write_buffer_size(), client.events) == (1000, [])
        client.transport.write(b"u")
        assert client.events == ["pause"]
        await asyncio.sleep(60)
        assert (server.data, client.transport.get_write_buffer_size()) == (b"", 1001)
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert client.events == ["pause", "resume"]
        assert server.data == b"w" * 4096 + b"u" * 1001

    run_pair(body, LinkProfile(window_bytes=4096))


def test_water_marks_are_checked() -> None:
    async def body(pair: Pair) -> None:
        pair.client.transport.set_write_buffer_limits(low=10)
        assert pair.client.transport.get_write_buffer_limits() == (10, 40)
        with pytest.raises(ValueError, match="water marks"):
            pair.client.transport.set_write_buffer_limits(high=1, low=2)
        with pytest.raises(TypeError, match="bytes-like"):
            pair.client.transport.write("text")  # type: ignore[arg-type]

    run_pair(body)


def test_close_sends_what_was_written_and_ends_both_sides() -> None:
    async def body(pair: Pair) -> None:
        pair.client.transport.write(b"x" * 50_000)
        pair.client.transport.close()
        pair.client.transport.write(b"too late")
        assert pair.client.transport.is_closing()
        assert (await pair.client.ended, await pair.server.ended) == (None, None)
        assert pair.server.data == b"x" * 50_000
        assert pair.server.events == ["eof"]

    run_pair(body, LinkProfile(window_bytes=1000))


def test_abort_drops_unsent_bytes_and_resets_the_peer() -> None:
    async def body(pair: Pair) -> None:
        pair.client.transport.write(b"x" * 50_000)
        pair.client.transport.abort()
        assert await pair.client.ended is None
        assert isinstance(await pair.server.ended, ConnectionResetError)
        assert len(pair.server.data) == 1000

    run_pair(body, LinkProfile(window_bytes=1000))


def test_half_open_peer_may_answer_until_the_reader_is_gone() -> None:
    async def body(pair: Pair) -> None:
        pair.client.transport.write_eof()
        with pytest.raises(RuntimeError, match="write_eof"):
            pair.client.transport.write(b"more")
        await asyncio.sleep(1)
        assert pair.server.events == ["eof"]
        pair.server.transport.write(b"answer")
        await asyncio.sleep(1)
        assert pair.client.data == b"answer"
        pair.client.transport.close()
        await pair.client.ended
        pair.server.transport.write(b"to nobody")
        assert isinstance(await pair.server.ended, ConnectionResetError)

    run_pair(body, half_open=True)


def test_close_gives_up_on_a_peer_that_takes_nothing() -> None:
    async def body(pair: Pair) -> None:
        begun = asyncio.get_running_loop().time()
        pair.server.transport.pause_reading()
        pair.client.transport.write(b"x" * 5000)
        pair.client.transport.close()
        assert isinstance(await pair.client.ended, TimeoutError)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(15.0)
        pair.server.transport.resume_reading()
        assert isinstance(await pair.server.ended, ConnectionResetError)

    run_pair(body, LinkProfile(window_bytes=1000))


def test_a_failing_protocol_loses_its_connection_and_is_reported() -> None:
    async def body(pair: Pair) -> None:
        pair.server.data_received = lambda data: 1 / 0  # type: ignore[method-assign,assignment]
        pair.client.transport.write(b"x")
        assert isinstance(await pair.client.ended, ConnectionResetError)

    with pytest.raises(Unhandled, match="ZeroDivisionError"):
        run_pair(body)


def test_callbacks_do_not_see_the_context_of_the_sender() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    async def body(pair: Pair) -> None:
        seen: list[str] = []
        pair.server.data_received = lambda data: seen.append(variable.get())  # type: ignore[method-assign]
        variable.set("of the sender")
        pair.client.transport.write(b"x")
        await asyncio.sleep(1)
        assert seen == ["clean"]

    run_pair(body)


def test_virtual_process_bundles_the_ports_of_one_host() -> None:
    async def main() -> list[int]:
        network = VirtualNetwork(random.Random(1))
        processes = [VirtualProcess.on(network, name, seed=5) for name in ("a", "b", "a")]
        assert processes[0].network is network.host("a")
        assert processes[0].clock.monotonic() == 0.0
        assert await processes[0].blocking.run(lambda: 1, timeout_s=1) == 1
        return [process.rng.getrandbits(32) for process in processes]

    a, b, a_again = run_virtual(main)
    assert a == a_again != b
