"""Whatever bytes arrive, the decoders of everything that listens raise what they promise, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.endpoints import decode_instance
from kvolt.core.errors import MALFORMED, InvalidRequest, KvoltError, NetworkFault, ProtocolError
from kvolt.engines.framing import FrameSplitter
from kvolt.engines.kv_formats.schema import decode_batch
from kvolt.frontend.openai_api.decoding import RequestDecoder
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest
from kvolt.kv.shared_pool import wire as pool_wire
from kvolt.router.service import http_messages
from kvolt.router.service import messages as service_messages
from kvolt.runtime.discovery import directory as discovery_directory
from kvolt.runtime.events import zmq_sockets as events_zmq
from kvolt.runtime.join import server as join_server
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.transfer.paths.capabilities import PathCapabilities
from kvolt.transfer.reads import wire as transfer_wire
from kvolt.transfer.reads.wire import FrameReader, decode_ticket
from kvolt.worker.kv import handoffs
from kvolt.worker.kv import rendezvous as meetings
from kvolt.worker.kv.mover import _read_tickets

NESTED = b"\x91" * 100_000
BAD_TEXT = b"\x81\xa1\xff\xa1\xff"

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


def damaged(valid: list[bytes]) -> st.SearchStrategy[bytes]:
    """Noise, well-formed values of any shape, and valid messages with some bytes changed, cut or put in."""

    def change(message: bytes, at: int, piece: bytes, cut: int) -> bytes:
        at %= len(message) + 1
        return message[:at] + piece + message[at + cut :]

    changed = st.builds(
        change,
        st.sampled_from(valid or [b"\x80"]),
        st.integers(0, 400),
        st.binary(max_size=4),
        st.integers(0, 4),
    )
    return (
        st.binary(max_size=60)
        | VALUES.map(msgspec.msgpack.encode)
        | changed
        | st.sampled_from([NESTED, BAD_TEXT, b"", b"\xff", b"\xc1"])
    )


def packed(*values: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(value) for value in values]


def only(*allowed: type[BaseException]) -> Callable[[Callable[[], object]], None]:
    def check(call: Callable[[], object]) -> None:
        with suppress(*allowed):
            call()

    return check


# --- transfer agents

_ADDRESS = transfer_wire.Address("agent", "127.0.0.1", 1, "name")
TRANSFER = packed(
    transfer_wire.Hello("agent", "frames"),
    transfer_wire.Welcome("agent", capabilities=PathCapabilities(paths=frozenset(("shm",)))),
    transfer_wire.Fetch(1, b"2", "tcp", b"12345678"),
    transfer_wire.Ready(1, 2, b"12345678"),
    transfer_wire.Receive(1, 2, 3.0),
)


@given(damaged(TRANSFER), st.integers(0, 1 << 20))
def test_transfer_frames(body: bytes, more: int) -> None:
    for frame in (len(body).to_bytes(4, "little") + body, body, more.to_bytes(4, "little") + body):
        only(ProtocolError)(lambda frame=frame: list(FrameReader().feed(frame)))  # type: ignore[misc]


@given(damaged([]))
def test_tickets(data: bytes) -> None:
    only(ProtocolError)(lambda: decode_ticket(data))
    only(ProtocolError)(lambda: _read_tickets(data, b"proof"))
    only(ProtocolError)(lambda: meetings._decode_part(data))
    only(*MALFORMED)(lambda: handoffs._decode(data))


# --- the request plane


class _Host:
    def wake(self) -> None: ...

    def on_hello(self, hello: wire.Hello) -> None: ...

    def on_open(self, stream: ServedStream) -> None:
        try:
            stream.decode_body(msgspec.msgpack.Decoder(join_server.PutRequest).decode)
        except InvalidRequest as error:
            stream.end(error)

    def report_callback_error(self, fault: Exception) -> None:
        raise fault


HELLO = wire.Hello(
    versions=wire.VERSIONS, process="p", max_frame_bytes=1 << 20, max_message_bytes=1 << 20, heartbeat_s=1.0
)
PLANE = packed(
    HELLO,
    wire.Open("target", 8, 1.0, {"a": "b"}, False, msgspec.Raw(b"\xc0")),
    [[1, None], [3, {"code": "x", "message": "y"}]],
    [[1, 8], [0, 100]],
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(wire.FrameKind), st.integers(0, 9), damaged(PLANE)), max_size=4))
def test_sessions(frames: list[tuple[wire.FrameKind, int, bytes]]) -> None:
    for greeted in (False, True):
        session = Session(dialer=False, hello=HELLO, limits=SessionLimits(), host=_Host(), stats=PlaneStats())
        if greeted:
            session.receive(wire.frame(wire.FrameKind.HELLO, 0, wire.encode(HELLO)))
        data = b"".join(wire.frame(kind, stream_id, payload) for kind, stream_id, payload in frames)
        only(ProtocolError)(lambda session=session, data=data: session.receive(data))  # type: ignore[misc]
        session.drain_urgent()


# --- everything else that is decoded from what a peer, a client or a file says

_BODIES = [
    b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}',
    b'{"model": "m", "prompt": "Hi", "temperature": 0.5, "stop": ["a"]}',
]


@given(damaged(_BODIES))
def test_http_bodies(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        only(InvalidRequest)(lambda kind=kind: RequestDecoder(kind).decode(body))  # type: ignore[misc]
    only(InvalidRequest)(lambda: http_messages.read(body, http_messages.PlacementQuery))


@given(damaged(packed([1.0, [["BlockStored", [1], None, [1], 4]], 0])))
def test_kv_events_of_engines(payload: bytes) -> None:
    for engine in ("vllm", "sglang"):
        only(msgspec.MsgspecError)(lambda engine=engine: decode_batch(payload, engine))  # type: ignore[misc]


@given(damaged(packed(["key", "lease", b"value"])))
def test_discovery(data: bytes) -> None:
    decode_instance(data)
    only(*MALFORMED)(lambda: discovery_directory._decode_record(data))
    events_zmq.decode([data, data, data, data])
    events_zmq.decode([b"t\0", data, b"\1" * 8, b""])


@given(damaged([b"\x05\0\0\0hello"]))
def test_frames_of_children(data: bytes) -> None:
    only(ProtocolError)(lambda: FrameSplitter().feed(data))


@given(
    damaged(
        packed(
            pool_wire.RequestFrame(1, pool_wire.Status()),
            pool_wire.RequestFrame(2, pool_wire.Lookup((b"x" * 16,))),
        )
    )
)
def test_pool_messages(data: bytes) -> None:
    only(*MALFORMED)(lambda: msgspec.msgpack.decode(data, type=pool_wire.RequestFrame))
    only(*MALFORMED)(lambda: msgspec.msgpack.decode(data, type=pool_wire.ResponseFrame))

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await pool_wire.read_frame(reader)

    only(NetworkFault)(lambda: asyncio.run(read()))


@pytest.mark.parametrize(
    "kind",
    [
        join_server.HoldRequest,
        join_server.PutRequest,
        join_server.KeyRequest,
        service_messages.RouteRequest,
        service_messages.OpenSession,
    ],
)
@settings(max_examples=60)
@given(data=damaged(packed({"lease": "x", "key": "k", "value": b"", "ttl_s": 1.0})))
def test_request_bodies(kind: Any, data: bytes) -> None:
    opening = wire.Open("t", 1, None, {}, False, msgspec.Raw(b""))
    session = Session(dialer=False, hello=HELLO, limits=SessionLimits(), host=_Host(), stats=PlaneStats())
    stream = ServedStream(session, 1, opening, data)
    only(KvoltError)(lambda: stream.decode_body(msgspec.msgpack.Decoder(kind).decode))
