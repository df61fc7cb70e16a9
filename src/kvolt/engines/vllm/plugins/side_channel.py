"""Messages of readers to the owner of held blocks, over the ZMQ socket of vLLM's NIXL handshakes (the side channel).

`check`: is a hold intact? `renew`: a reader still waits for these. vLLM's own handshakes pass through unchanged. A
malformed message is dropped: anything can connect to the port.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from kvolt.engines.vllm.plugins.kv_holds import Holds

log = logging.getLogger(__name__)

HOLD_S = "kvolt_hold_s"
"""Transfer parameter: how long the owner holds blocks without renewal. In a ticket: its owner answers checks."""
DEADLINE_S = "kvolt_deadline_s"
"""Transfer parameter: no renewal extends the hold beyond."""
_CHECK, _RENEW = b"kvolt_check", b"kvolt_renew"
_MAX_BYTES = 1 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode_answer = msgspec.msgpack.Decoder(tuple[int, bool]).decode


class _Check(msgspec.Struct, array_like=True):
    engine_id: str
    number: int
    name: str


class _Renew(msgspec.Struct, array_like=True):
    engine_id: str
    names: list[str]


class _Message(msgspec.Struct, array_like=True):
    kind: bytes
    body: msgspec.Raw


_decode_message = msgspec.msgpack.Decoder(_Message).decode
_decode_check = msgspec.msgpack.Decoder(_Check).decode
_decode_renew = msgspec.msgpack.Decoder(_Renew).decode


def check_message(engine_id: str, number: int, name: str) -> bytes:
    return _encode(_Message(_CHECK, msgspec.Raw(_encode(_Check(engine_id, number, name)))))


def renew_message(engine_id: str, names: Sequence[str]) -> bytes:
    return _encode(_Message(_RENEW, msgspec.Raw(_encode(_Renew(engine_id, list(names))))))


def answer_of(parts: Sequence[bytes]) -> tuple[int, bool] | None:
    """The number of a check and its answer; None for anything else."""
    try:
        return _decode_answer(parts[-1])
    except (msgspec.MsgspecError, RecursionError, IndexError):
        return None


@dataclass(frozen=True)
class HoldAnswers:
    """The owner's answers to readers. Checks for another `engine_id` (before a restart) are answered with no."""

    engine_id: str
    holds: Holds

    def answer(self, message: bytes) -> tuple[bytes, ...] | None:
        """Parts of the answer, empty if none is due; None for a message of another kind."""
        decoded = _decode_message(message)
        if decoded.kind == _CHECK:
            check = _decode_check(decoded.body)
            is_own = check.engine_id == self.engine_id
            return (_encode((check.number, is_own and self.holds.is_intact(check.name))),)
        if decoded.kind == _RENEW:
            renew = _decode_renew(decoded.body)
            if renew.engine_id == self.engine_id:
                self.holds.renew(renew.names)
            return ()
        return None


def serve(
    socket: Any,
    holds: HoldAnswers,
    handshake: Callable[[bytes], tuple[bytes, ...]],
    is_over: Callable[[], bool],
) -> None:
    """Answer what arrives at a ROUTER socket with a receive timeout, until `is_over`. For a thread."""
    while not is_over():
        try:
            identity, *_, message = socket.recv_multipart()
        except (zmq.Again, ValueError):  # nothing yet, or no message
            continue
        if len(message) > _MAX_BYTES:
            continue
        try:
            parts = holds.answer(message)
            if parts is None:
                parts = handshake(message)
        except Exception as error:  # malformed bytes must not end the thread that serves all readers
            log.debug("side channel: message dropped: %r", error)
            continue
        if parts:
            socket.send_multipart((identity, b"", *parts))
