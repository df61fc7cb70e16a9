"""Checks after a read whether the owner held the blocks until then.

Polled like the transfers: no thread, no blocking. A late answer counts as no.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvolt.engines.vllm.plugins.side_channel import answer_of, check_message

CHECK_S = 5.0
"""Timeout of the owner's answer; equal to vLLM's handshake timeout."""
_MAX_IDLE_OWNERS = 64
"""Idle connections to owners."""

Address = tuple[str, int]


@dataclass(slots=True)
class _Check:
    name: str
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
    _pending: dict[int, _Check] = field(default_factory=dict)
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
        self._pending[number] = _Check(name, self.now(), owner)
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
