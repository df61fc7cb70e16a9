"""What the engine and its shell say to each other: typed messages, in the frames of `child_messages`.

The shell sends commands, which are counted; the engine handles them in order, between steps. Every step says how
many of them it had seen, so that the shell can tell what it said before it knew better (see `Step.num_seen`).
Knows neither sockets nor torch: both ends read and write it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import Delta, StepOutput
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_block import KvBlock, KvLayout
from kvolt.core.kv_events import KvChange, Stored
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.child_messages import raw
from kvolt.engines.contract import EngineSpec, KvHeld, KvRoom, KvTaken, Pooling, SealedKv
from kvolt.engines.native.arguments import NativeArguments
from kvolt.scheduler.step_plan import Limits
from kvolt.transfer.memory.device_memory import DeviceHandle

_NOTHING = raw(None)


# --- Commands -----------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message, and no command: what to load."""

    spec: EngineSpec
    arguments: NativeArguments
    core: str
    """What loads it, as `module:function`."""
    log_level: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    request: Request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: RequestId


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Answered by a Reply with the same number."""

    number: int
    method: str
    arguments: msgspec.Raw


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    pass


Command = Submit | Abort | Call | Stop

# --- Answers ------------------------------------------------------------------------------------------


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the shell must know of a loaded engine to check requests and to name blocks."""

    limits: Limits
    keys: BlockKeyContext
    """Common to all block keys, but for adapters and salts."""
    layout: KvLayout
    loras: dict[str, str]
    """Digests of the loaded adapters by name, in order of loading."""
    vocab_size: int
    device_memory: DeviceHandle | None = None
    """By which the KV blocks are reached that lie in a device's memory; None where that cannot be."""
    device: str = "cpu"


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """What loading is at, for people."""

    text: str


class Log(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """A log record of the engine's process."""

    level: int
    logger: str
    text: str


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    card: ModelCard
    info: EngineInfo
    facts: Facts


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A StepOutput. One is sent per step, so what stays the same from step to step is left out."""

    num_seen: int
    """Commands handled before it. What a step with a smaller number says of a request is about its past."""
    plain_tokens: tuple[int, ...] = ()
    plain_ids: tuple[RequestId, ...] | None = None
    """None: those of the latest step that told them."""
    load: WorkerLoad | None = None
    deltas: tuple[tuple[RequestId, Delta], ...] = ()
    kv_changes: tuple[KvChange, ...] = ()
    failed: tuple[tuple[RequestId, ErrorInfo], ...] = ()


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    number: int
    value: msgspec.Raw = _NOTHING
    error: ErrorInfo | None = None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The last message: why the engine ends."""

    error: ErrorInfo
    trace: str = ""
    """Where it happened; empty for an error that was foreseen."""


Answer = Progress | Log | Loaded | Step | Reply | Fatal

decode_start = msgspec.msgpack.Decoder(Start).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class StepWording:
    """StepOutputs as messages. Remembers which batch the other end knows."""

    def __init__(self) -> None:
        self._plain_ids: tuple[RequestId, ...] = ()

    def step(self, num_seen: int, output: StepOutput) -> Step:
        plain_ids: tuple[RequestId, ...] | None = None
        if output.plain_ids != self._plain_ids:
            # Also when there are none now: the same ids after a pause may be other requests.
            plain_ids = self._plain_ids = output.plain_ids
        return Step(
            num_seen,
            output.plain_tokens,
            plain_ids,
            output.load,
            output.deltas,
            output.kv_changes,
            output.failed,
        )


# --- Calls --------------------------------------------------------------------------------------------

R = TypeVar("R")


class Method(Generic[R]):
    """A call that the shell passes on: its name, and the types of what goes there and comes back."""

    __slots__ = ("decode_arguments", "decode_value", "name", "timeout_s")

    def __init__(
        self, name: str, arguments: Any, result: type[R] | Any, timeout_s: float | None = 60.0
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.decode_arguments = msgspec.msgpack.Decoder(arguments).decode
        self.decode_value = msgspec.msgpack.Decoder(result).decode


WITHDRAW: Method[bool] = Method("withdraw", tuple[RequestId], bool)
CLEAR_KV: Method[int] = Method("clear_kv", tuple[()], int)
MATCH: Method[int] = Method("match", tuple[Request], int)
KV_CONTENTS: Method[tuple[Stored, ...]] = Method("kv_contents", tuple[()], tuple[Stored, ...])
EXPORT_KV: Method[tuple[KvBlock, ...]] = Method("export_kv", tuple[list[BlockKey]], tuple[KvBlock, ...])
IMPORT_KV: Method[int] = Method("import_kv", tuple[list[KvBlock]], int)
HOLD_KV: Method[KvHeld] = Method("hold_kv", tuple[RequestId], KvHeld)
COMPUTED_KV: Method[KvHeld] = Method("computed_kv", tuple[RequestId, int], KvHeld, None)  # as long as PREFILL
MAKE_ROOM: Method[KvRoom] = Method("make_room", tuple[list[BlockKey], list[SequenceHash]], KvRoom)
SETTLE_KV: Method[None] = Method("settle_kv", tuple[KvRoom, int, RequestId | None], None)
TAKE_KV: Method[KvTaken] = Method("take_kv", tuple[KvRoom, int, RequestId], KvTaken)
PIN_SEALED: Method[tuple[SealedKv, ...]] = Method("pin_sealed", tuple[RequestId], tuple[SealedKv, ...])
PREFILL: Method[Handoff] = Method(
    "prefill", tuple[Request], Handoff, None
)  # its caller's to bound, as a request is
RELEASE_PREFILL: Method[None] = Method("release_prefill", tuple[RequestId], None)
LOAD_LORA: Method[None] = Method("load_lora", tuple[str, str], None, 300.0)
UNLOAD_LORA: Method[None] = Method("unload_lora", tuple[str], None)
LORAS: Method[dict[str, str]] = Method("loras", tuple[()], dict[str, str])
EMBED: Method[list[list[float]]] = Method("embed", tuple[list[list[int]], Pooling], list[list[float]], 300.0)

METHODS: dict[str, Method[Any]] = {
    method.name: method
    for method in (
        WITHDRAW,
        CLEAR_KV,
        MATCH,
        KV_CONTENTS,
        EXPORT_KV,
        IMPORT_KV,
        HOLD_KV,
        COMPUTED_KV,
        MAKE_ROOM,
        SETTLE_KV,
        TAKE_KV,
        PIN_SEALED,
        PREFILL,
        RELEASE_PREFILL,
        LOAD_LORA,
        UNLOAD_LORA,
        LORAS,
        EMBED,
    )
}
