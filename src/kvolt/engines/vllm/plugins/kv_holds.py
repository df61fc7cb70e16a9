"""Holds: blocks kept for readers on other workers, the messages about them, and the reports of reads.

A hold ends by its release, by its expiry or at the request's deadline. Readers renew it while they wait, and check
after the read whether it is intact: a hold that is intact after the read was intact during the read. The scheduler of
the owner decides (`Holds`), the thread that serves the side channel answers (`serve`); both run in vLLM's engine
process. `HoldChecks` is the reader's side.

The side channel is the ZMQ socket of vLLM's NIXL handshakes, which pass through unchanged. A malformed message is
dropped: anything can connect to the port.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

log = logging.getLogger(__name__)

Address = tuple[str, int]

HOLD_S = "kvolt_hold_s"
"""Transfer parameter: how long the owner holds blocks without renewal. In a ticket: its owner answers checks."""
DEADLINE_S = "kvolt_deadline_s"
"""Transfer parameter: no renewal extends the hold beyond."""
RELEASE = "kvolt_release"
"""Transfer parameter: the request whose blocks are to be released."""
READS = "kvolt_reads"
"""Key of vLLM's connector statistics: a list of `Read`."""
CHECK_S = 5.0
"""Timeout of the owner's answer; equal to vLLM's handshake timeout."""

_CHECK, _RENEW = b"kvolt_check", b"kvolt_renew"
_MAX_BYTES = 1 << 20
_MAX_IDLE_OWNERS = 64
"""Idle connections to owners."""
_CONNECTOR = "KvoltNixlConnector"
"""Name of its statistics when several connectors report."""

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Hold:
    hold_s: float
    expires_at: float
    deadline_at: float


class Holds:
    """See the module. `now`: seconds of a monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._holds: dict[str, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def begin(self, name: str, hold_s: float, deadline_s: float | None = None) -> None:
        """Hold the blocks of request `name`. `deadline_s`: no renewal extends the hold beyond."""
        now = self._now()
        deadline_at = math.inf if deadline_s is None else now + deadline_s
        with self._lock:
            self._holds[name] = _Hold(hold_s, min(now + hold_s, deadline_at), deadline_at)

    def renew(self, names: Iterable[str]) -> None:
        """A reader waits for these. An ended hold stays ended."""
        now = self._now()
        with self._lock:
            for name in names:
                if (hold := self._holds.get(name)) is not None:
                    hold.expires_at = max(hold.expires_at, min(now + hold.hold_s, hold.deadline_at))

    def is_intact(self, name: str) -> bool:
        """Whether the blocks of request `name` have been held without interruption until now."""
        with self._lock:
            return name in self._holds

    def end(self, name: str) -> bool:
        """End a hold before its blocks are released. Returns whether it existed."""
        with self._lock:
            return self._holds.pop(name, None) is not None

    def end_expired(self) -> list[str]:
        """End expired holds and return their names."""
        now = self._now()
        with self._lock:
            expired = [name for name, hold in self._holds.items() if now >= hold.expires_at]
            for name in expired:
                del self._holds[name]
        return expired


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


def connect(context: Any, host: str, port: int) -> Any:
    """A DEALER socket to an owner's side channel. ZMQError."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in host)
        socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


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


@dataclass(slots=True)
class _PendingCheck:
    asked_at: float
    owner: Address
    answer: bool | None = None


@dataclass
class HoldChecks:
    """See the module. `connect`: a DEALER socket to an address. `now`: seconds of a monotonic clock."""

    connect: Callable[[str, int], Any]
    now: Callable[[], float]
    limit_s: float = CHECK_S
    _sockets: dict[Address, Any] = field(default_factory=dict)
    _pending: dict[int, _PendingCheck] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _last_number: int = 0

    def __len__(self) -> int:
        return len(self._pending)

    def check(self, name: str, owner: Address, engine_id: str, held_name: str) -> bool | None:
        """Whether `held_name` of engine `engine_id` is intact; None while the answer is open: call again.

        `name`: of the read. The first call sends the check; the call that returns an answer forgets it."""
        number = self._numbers.get(name)
        if number is None:
            number = self._ask(name, owner, engine_id, held_name)
        self._receive(owner)
        pending = self._pending[number]
        if pending.answer is None and self.now() - pending.asked_at < self.limit_s:
            return None
        del self._pending[number], self._numbers[name]
        return bool(pending.answer)

    def _ask(self, name: str, owner: Address, engine_id: str, held_name: str) -> int:
        self._last_number += 1
        number = self._numbers[name] = self._last_number
        self._pending[number] = _PendingCheck(self.now(), owner)
        with contextlib.suppress(zmq.ZMQError):  # not sent: no answer arrives
            if owner not in self._sockets:
                self._close_idle()
                self._sockets[owner] = self.connect(*owner)
            self._sockets[owner].send_multipart(
                (b"", check_message(engine_id, number, held_name)), zmq.DONTWAIT
            )
        return number

    def _receive(self, owner: Address) -> None:
        socket = self._sockets.get(owner)
        while socket is not None:
            try:
                parts = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            answer = answer_of(parts)
            if answer is not None and (pending := self._pending.get(answer[0])) is not None:
                pending.answer = answer[1] and pending.owner == owner

    def _close_idle(self) -> None:
        if len(self._sockets) < _MAX_IDLE_OWNERS:
            return
        busy = {pending.owner for pending in self._pending.values()}
        for owner in [each for each in self._sockets if each not in busy]:
            self._sockets.pop(owner).close(0)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(0)
        self._sockets.clear()


class Read(msgspec.Struct, frozen=True, array_like=True):
    """KV of one request, read by one worker and confirmed by its owner."""

    engine_id: str
    """Id of the request in the engine."""
    num_bytes: int
    took_s: float


def reads_of(statistics: Mapping[str, Any] | None) -> Iterator[Read]:
    """Reads reported with a step."""
    if not statistics:
        return
    own = statistics.get(_CONNECTOR, statistics)
    if not isinstance(own, Mapping):
        return
    for each in own.get(READS) or ():
        try:
            yield msgspec.convert(each, Read)
        except msgspec.ValidationError:
            continue
