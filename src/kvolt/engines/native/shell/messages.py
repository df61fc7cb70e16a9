"""Messages between the engine and its shell, in the frames of `framing`.

The shell numbers its commands; the engine handles them in order between steps. Every step carries the number
of commands handled before it, so that the shell can detect outdated output (see `Step.num_seen`). Imports
neither sockets nor torch.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvolt.core.block_key import BlockKeyContext, KvLayout
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import Delta, StepOutput
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import KvChange, Stored
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import AttachedKv, EngineSpec, HeldKv, KvAllocation, Pooling, SealedKv
from kvolt.engines.framing import encode_raw
from kvolt.engines.native.arguments import NativeArguments
from kvolt.scheduler.step_plan import Limits
from kvolt.transfer.memory.device_memory import DeviceHandle

_NONE = encode_raw(None)


# --- Commands -----------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first message: what to load. Not counted as a command."""

    spec: EngineSpec
    arguments: NativeArguments
    core: str
    """Loader of the core, as `module:function`."""
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


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded engine that the shell needs to check requests and to name blocks."""

    limits: Limits
    keys: BlockKeyContext
    """Constant part of all block keys, without adapters and salts."""
    layout: KvLayout
    loras: dict[str, str]
    """Digests of the loaded adapters by name, in loading order."""
    vocab_size: int
    device_memory: DeviceHandle | None = None
    """Handle of KV blocks in device memory; None if they cannot be shared."""
    device: str = "cpu"


class Log(msgspec.Struct, frozen=True, array_like=True, tag="log"):
    """A log record of the engine process."""

    level: int
    logger: str
    text: str


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    card: ModelCard
    info: EngineInfo
    facts: EngineFacts


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A StepOutput. Sent for every step, so fields that rarely change are omitted."""

    num_seen: int
    """Commands handled before it. Output of a step with a smaller number may concern dropped requests."""
    plain_tokens: tuple[int, ...] = ()
    plain_ids: tuple[RequestId, ...] | None = None
    """None: unchanged since the last step that had them."""
    load: WorkerLoad | None = None
    deltas: tuple[tuple[RequestId, Delta], ...] = ()
    kv_changes: tuple[KvChange, ...] = ()
    failed: tuple[tuple[RequestId, ErrorInfo], ...] = ()


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    number: int
    value: msgspec.Raw = _NONE
    error: ErrorInfo | None = None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The last message: why the engine ends."""

    error: ErrorInfo
    trace: str = ""
    """Traceback; empty for an expected error."""


Answer = Log | Loaded | Step | Reply | Fatal

decode_start = msgspec.msgpack.Decoder(Start).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class StepEncoder:
    """Encodes StepOutputs as Steps. Remembers the plain ids that the other end knows."""

    def __init__(self) -> None:
        self._plain_ids: tuple[RequestId, ...] = ()

    def step(self, num_seen: int, output: StepOutput) -> Step:
        plain_ids: tuple[RequestId, ...] | None = None
        if output.plain_ids != self._plain_ids:
            # Also if empty: the same ids after a pause may belong to other requests.
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
    """A method that the shell can call: name, argument and result types, timeout."""

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
HELD_KV: Method[HeldKv] = Method("held_kv", tuple[RequestId], HeldKv)
COMPUTED_KV: Method[HeldKv] = Method("computed_kv", tuple[RequestId, int], HeldKv, None)  # as long as PREFILL
ALLOCATE_KV: Method[KvAllocation] = Method(
    "allocate_kv", tuple[list[BlockKey], list[SequenceHash]], KvAllocation
)
COMMIT_KV: Method[None] = Method("commit_kv", tuple[KvAllocation, int, RequestId | None], None)
ATTACH_KV: Method[AttachedKv] = Method("attach_kv", tuple[KvAllocation, int, RequestId], AttachedKv)
PIN_SEALED: Method[tuple[SealedKv, ...]] = Method("pin_sealed", tuple[RequestId], tuple[SealedKv, ...])
PREFILL: Method[Handoff] = Method(
    "prefill", tuple[Request], Handoff, None
)  # bounded by its caller, like a request
RELEASE_PREFILL: Method[None] = Method("release_prefill", tuple[RequestId], None)
LOAD_LORA: Method[None] = Method("load_lora", tuple[str, str], None, 300.0)
UNLOAD_LORA: Method[None] = Method("unload_lora", tuple[str], None)
LORAS: Method[dict[str, str]] = Method("loras", tuple[()], dict[str, str])
EMBED: Method[list[list[float]]] = Method("embed", tuple[list[list[int]], Pooling], list[list[float]], 300.0)

METHODS: dict[str, Method[Any]] = {
    each.name: each for each in tuple(globals().values()) if isinstance(each, Method)
}
