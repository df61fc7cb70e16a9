"""Version 2 of the request plane's bytes: what we encode today is what was written down, what was written
down is understood today, and so is what a later release may add. A peer of no common version is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import KvoltError, VersionMismatch
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.connection import Connection, ConnectionOptions
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.plane.wire import FrameDecoder, FrameKind
from kvolt.testing.virtual.loop import run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "data" / "golden_frames.json").read_text())


def _load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden_frames", HERE / "make_golden_frames.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = _load_maker()
TODAY = maker.golden()
VALUES = maker.frames()

DECODERS: dict[int, Any] = {
    FrameKind.HELLO: wire.decode_hello,
    FrameKind.REFUSE: wire.decode_error,
    FrameKind.OPEN: wire.decode_open,
    FrameKind.DELTAS: wire.decode_deltas,
    FrameKind.ITEMS: wire.decode_items,
    FrameKind.ENDS: wire.decode_ends,
    FrameKind.CREDIT: wire.decode_credit,
}


def meaning(data: bytes) -> tuple[int, int, Any]:
    ((kind, stream, payload),) = FrameDecoder(1 << 20).feed(data)
    value = DECODERS[kind](payload) if kind in DECODERS else payload
    return kind, stream, maker.plain(value)


def test_every_kind_is_written_down() -> None:
    assert {frame["kind"] for frame in GOLDEN["frames"].values()} == {kind.name for kind in FrameKind}


@pytest.mark.parametrize("name", GOLDEN["frames"])
def test_we_send_what_was_written_down(name: str) -> None:
    assert TODAY["frames"][name] == GOLDEN["frames"][name]


@pytest.mark.parametrize("name", GOLDEN["frames"])
def test_we_understand_what_was_written_down(name: str) -> None:
    frame = GOLDEN["frames"][name]
    kind, stream, value = VALUES[name]
    assert meaning(bytes.fromhex(frame["hex"])) == (kind, stream, maker.plain(value))
    assert maker.plain(value) == frame["payload"]


@pytest.mark.parametrize("name", GOLDEN["future"])
def test_we_ignore_what_a_later_release_adds(name: str) -> None:
    frame = GOLDEN["future"][name]
    assert frame["hex"] == TODAY["future"][name]["hex"]
    known = GOLDEN["frames"][frame["means"]]
    assert frame["hex"] != known["hex"]
    assert meaning(bytes.fromhex(frame["hex"])) == meaning(bytes.fromhex(known["hex"]))


@pytest.mark.parametrize("number", range(len(GOLDEN["conversation"])))
def test_a_session_speaks_it(number: int) -> None:
    assert TODAY["conversation"][number] == GOLDEN["conversation"][number]


def test_the_conversation_has_every_kind() -> None:
    """But those that only a batch of an engine and a broken peer bring about."""
    data = {"dialer": b"", "acceptor": b""}
    for name, said in maker.conversation():
        data[name] += said
    kinds = {kind for each in data.values() for kind, _, _ in FrameDecoder(1 << 20).feed(each)}
    assert kinds == set(FrameKind) - {FrameKind.REFUSE, FrameKind.STEP}
    assert len(TODAY["conversation"]) == len(GOLDEN["conversation"])


# --- versions


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1,), (1,), 1), ((1,), (2, 1), 1), ((2, 1), (1, 2, 3), 2), ((1,), (99,), None), ((1,), (), None)],
)
def test_negotiation(ours: tuple[int, ...], theirs: tuple[int, ...], agreed: int | None) -> None:
    assert wire.negotiate(ours, theirs) == wire.negotiate(theirs, ours) == agreed


class _Stranger:
    """A peer that speaks version 99 only, and is otherwise like us."""

    def __init__(self) -> None:
        self.stats = PlaneStats()
        self.closed: asyncio.Future[KvoltError] = asyncio.get_running_loop().create_future()

    def make(self, dialer: bool) -> Connection:
        hello = msgspec.structs.replace(maker.HELLO, versions=(99,))
        return Connection(
            dialer=dialer,
            hello=hello,
            options=ConnectionOptions(),
            on_made=lambda connection: None,
            on_open=lambda connection, stream: None,
            on_ready=lambda connection: None,
            on_silent=lambda connection: None,
            on_closed=lambda connection, reason: self.closed.set_result(reason),
            stats=self.stats,
            budget=ByteBudget(1 << 20, 1 << 20),
        )


def _ours(network: VirtualNetwork) -> TcpPlane:
    return TcpPlane(network.host("us"), ConnectionOptions(), "us", on_open=lambda stream: stream.end())


def test_a_stranger_who_dials_us_is_refused() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        connections = _ours(network)
        address = await connections.listen("us:7000")
        stranger = _Stranger()
        await network.host("them").connect(address, lambda: stranger.make(dialer=True), 5.0)
        async with asyncio.timeout(5):
            reason = await stranger.closed
        assert isinstance(reason, VersionMismatch)
        assert {reason.fields["ours"], reason.fields["theirs"]} == {"[2]", "[99]"}
        await asyncio.sleep(1)
        assert (connections.stats.refused_versions, stranger.stats.refused_versions) == (1, 1)
        assert connections.num_open == 0
        await connections.close()
        network.close()

    run_virtual(main)


def test_a_stranger_whom_we_dial_is_refused() -> None:
    async def main() -> None:
        network = VirtualNetwork(random.Random(1))
        connections = _ours(network)
        stranger = _Stranger()
        listener = await network.host("them").listen("them:7000", lambda: stranger.make(dialer=False))
        with pytest.raises(VersionMismatch) as caught:
            await connections.get(listener.address, 5.0)
        assert not caught.value.retryable
        async with asyncio.timeout(5):
            assert isinstance(await stranger.closed, VersionMismatch)
        assert (connections.stats.refused_versions, stranger.stats.refused_versions) == (1, 1)
        assert connections.stats.connects == {"version_mismatch": 1}
        assert connections.num_open == 0
        await connections.close()
        network.close()

    run_virtual(main)
