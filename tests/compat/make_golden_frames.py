"""Write data/golden_frames.json: the bytes of every frame kind of protocol version 2, and what they mean.

usage: python make_golden_frames.py

Peers of other releases speak these bytes, so a frame that is in the file never changes: the script
refuses to. Run it to add frames; a change of the format is a new version with frames of its own.

frames        one frame each: kind, stream, payload as a value (bytes as hex), and the whole frame in hex.
future        frames of version 2 as a later release may send them, with more in them than we know: "means"
              names the frame above that they must be understood as.
conversation  what each side of a scripted session sends, flush by flush (this may change): that the session really
              produces these frames, in this order. Long ones by their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.delta import Delta, FinishReason, StageTimes, TokenLogprobs, Usage
from kvolt.core.errors import EngineFailed, ErrorInfo, InvalidRequest, NotFound, to_info
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import pack_u32
from kvolt.runtime.plane.wire import FrameKind, Hello, Open

OUT = Path(__file__).parent / "data" / "golden_frames.json"

HELLO = Hello(
    versions=wire.VERSIONS,
    process="0123456789abcdef",
    address="10.0.0.1:7400",
    max_frame_bytes=1 << 20,
    max_message_bytes=64 << 20,
    heartbeat_s=1.0,
    software="kvolt 0.1.0",
)
RICH_DELTA = Delta(
    token_ids=(1, 200, 70000),
    index=1,
    finish=FinishReason.STOP,
    logprobs=(TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.5))),),
    prompt_logprobs=(None, TokenLogprobs(9, -2.0)),
    cached_tokens=64,
    usage=Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=8),
    stages=StageTimes(queue_ms=1.5, prefill_ms=20.0),
    stop_reason="\n\n",
)
FAILURE = EngineFailed("the engine died", engine="sim", attempts=2, after_s=0.5, fatal=True, detail=None)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(wire.encode(value))


def frames() -> dict[str, tuple[FrameKind, int, Any]]:
    """Payloads are values to be encoded, or bytes for the kinds that do not use msgpack."""
    body = {"prompt": [1, 2, 3]}
    return {
        "hello": (FrameKind.HELLO, 0, HELLO),
        "hello without an address": (
            FrameKind.HELLO,
            0,
            msgspec.structs.replace(HELLO, address=None, software=""),
        ),
        "refuse": (
            FrameKind.REFUSE,
            0,
            ErrorInfo("version_mismatch", "no", {"ours": "[1]", "theirs": "[9]"}),
        ),
        "open": (
            FrameKind.OPEN,
            1,
            Open("ns.worker.generate#7f", 256, 30.5, {"request_id": "r1"}, False, raw(body)),
        ),
        "open in chunks": (FrameKind.OPEN, 2**32 - 1, Open("ns.worker.card", 16, None, {}, True, raw(None))),
        "deltas": (FrameKind.DELTAS, 0, [(1, Delta((5,))), (3, Delta((100000,)))]),
        "delta with everything": (FrameKind.DELTAS, 0, [(1, RICH_DELTA)]),
        "items": (
            FrameKind.ITEMS,
            0,
            [(1, raw({"load": 0.5})), (3, raw(None)), (2**32 - 1, raw(b"\x00\xff"))],
        ),
        "chunk": (FrameKind.CHUNK, 5, b"\x00" + b"piece"),
        "last chunk": (FrameKind.CHUNK, 5, b"\x01" + b"piece"),
        "chunk of a delta": (FrameKind.CHUNK, 5, b"\x02" + b"piece"),
        "last chunk of a delta": (FrameKind.CHUNK, 5, b"\x03" + b"piece"),
        "chunk of a byte string": (FrameKind.CHUNK, 5, b"\x04" + b"piece"),
        "last chunk of a byte string": (FrameKind.CHUNK, 5, b"\x05" + b"piece"),
        "ends": (FrameKind.ENDS, 0, [(1, None), (3, to_info(FAILURE)), (5, to_info(ValueError("secret")))]),
        "cancel": (FrameKind.CANCEL, 7, b""),
        "credit": (FrameKind.CREDIT, 0, [(1, 128), (3, 1)]),
        "ping": (FrameKind.PING, 0, b""),
        "goaway": (FrameKind.GOAWAY, 0, b""),
        "step": (FrameKind.STEP, 0, pack_u32([2, 4, 6]) + pack_u32([11, 70000, 2**32 - 1])),
    }


def future() -> dict[str, tuple[str, FrameKind, int, Any]]:
    """Name: the frame that it means, kind, stream, payload."""
    hello = msgspec.to_builtins(HELLO) | {"compression": ["zstd"], "zone": None}
    refuse = {
        "code": "version_mismatch",
        "message": "no",
        "fields": {"ours": "[1]", "theirs": "[9]"},
        "help": 1,
    }
    opening = ["ns.worker.generate#7f", 256, 30.5, {"request_id": "r1"}, False, {"prompt": [1, 2, 3]}, "more"]
    ends = [
        (1, None),
        (3, {**msgspec.to_builtins(to_info(FAILURE)), "cause": {"code": "x"}}),
        (5, {**msgspec.to_builtins(to_info(ValueError("secret"))), "trace": ["a", "b"]}),
    ]
    return {
        "hello with more keys": ("hello", FrameKind.HELLO, 0, hello),
        "refuse with more keys": ("refuse", FrameKind.REFUSE, 0, refuse),
        "open with more elements": ("open", FrameKind.OPEN, 1, opening),
        "deltas with more keys": (
            "deltas",
            FrameKind.DELTAS,
            0,
            [(1, {"t": [5], "x": {"y": [1]}}), (3, {"zz": None, "t": [100000]})],
        ),
        "ends with more keys": ("ends", FrameKind.ENDS, 0, ends),
    }


class _Side:
    """A session whose handler answers with a script."""

    def __init__(self, dialer: bool) -> None:
        process = "dialer" if dialer else "acceptor"
        hello = Hello(
            versions=wire.VERSIONS,
            process=process,
            max_frame_bytes=1 << 20,
            max_message_bytes=1 << 20,
            heartbeat_s=1.0,
        )
        limits = SessionLimits(window_items=4)
        self.session = Session(dialer=dialer, hello=hello, limits=limits, host=self, stats=PlaneStats())
        self.streams: list[ServedStream] = []

    def wake(self) -> None: ...

    def on_hello(self, hello: Hello) -> None: ...

    def report_callback_error(self, fault: Exception) -> None:
        raise fault

    def on_open(self, stream: ServedStream) -> None:
        self.streams.append(stream)

    def on_item(self, item: Any) -> None: ...

    def on_end(self, error: Any) -> None: ...


def conversation() -> list[tuple[str, bytes]]:
    """Who sends what, in order."""
    dialer, acceptor = _Side(dialer=True), _Side(dialer=False)
    said: list[tuple[str, bytes]] = []

    def flush(name: str, sender: _Side, receiver: _Side) -> None:
        data = b"".join(sender.session.drain_urgent())
        while (chunk := sender.session.next_chunk()) is not None:
            data += chunk
        if data:
            said.append((name, data))
            receiver.session.receive(data)

    def exchange() -> None:
        flush("dialer", dialer, acceptor)
        flush("acceptor", acceptor, dialer)

    decode = msgspec.msgpack.Decoder().decode
    exchange()
    calls = [
        dialer.session.open(target, wire.encode(body), dialer, decode, 5.0, {"request_id": "r1"})
        for target, body in (
            ("ns.c.e", 1),
            ("ns.c.e#1", {"a": b"x"}),
            ("ns.c.long", b"x" * (wire.CHUNK_BYTES + 1)),
        )
    ]
    exchange()
    first, second, third = acceptor.streams
    for token in (1, 2, 3):
        first.send(Delta((token,)))
        second.send({"answer": token})
    third.end(NotFound("no such thing", kind="endpoint", name="ns.c.long"))
    exchange()
    calls[0].mark_consumed(3)
    calls[1].cancel()
    dialer.session.ping()
    exchange()
    first.send(Delta((4,), finish=FinishReason.LENGTH, usage=Usage(1, 4)))
    first.end()
    exchange()
    acceptor.session.open("ns.back.call", wire.encode(None), acceptor, decode)
    acceptor.session.go_away()
    exchange()
    dialer.streams[0].end(InvalidRequest("no", param="x"))
    exchange()
    return said


def plain(value: Any) -> Any:
    """A payload as JSON can hold it; raw msgpack and bytes as hex."""
    if isinstance(value, msgspec.Raw | bytes):
        return bytes(value).hex()
    if isinstance(value, Open):
        return [*(plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, msgspec.Struct):
        return msgspec.json.decode(msgspec.json.encode(value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def payload(value: Any) -> bytes:
    return value if isinstance(value, bytes) else wire.encode(value)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def golden() -> dict[str, Any]:
    return {
        "version": 1,
        "frames": {
            name: {
                "kind": kind.name,
                "stream": stream,
                "payload": plain(value),
                "hex": wire.frame(kind, stream, payload(value)).hex(),
            }
            for name, (kind, stream, value) in frames().items()
        },
        "future": {
            name: {"means": means, "hex": wire.frame(kind, stream, payload(value)).hex()}
            for name, (means, kind, stream, value) in future().items()
        },
        "conversation": [
            {"from": name, "num_bytes": len(data), "hex": data.hex() if len(data) < 1000 else digest(data)}
            for name, data in conversation()
        ],
    }


def main() -> int:
    made = golden()
    if OUT.exists():
        known = json.loads(OUT.read_text())
        changed = [name for name, frame in known["frames"].items() if made["frames"].get(name) != frame]
        if changed:
            print(f"version 2 would change: {', '.join(changed)}", file=sys.stderr)
            return 1
    OUT.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
