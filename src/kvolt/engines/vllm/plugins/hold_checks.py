"""HoldChecks: a reader's questions to owners, after a read, whether the blocks that it read were held until then.

Polled, like the transfers themselves: no thread and no wait. An answer that does not come in time counts as no.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvolt.engines.vllm.plugins.side_channel import answer_of, check_message

CHECK_S = 5.0
"""For the owner's answer. vLLM gives a handshake the same."""
_MAX_IDLE_OWNERS = 64
"""Owners with an open connection and no open question."""

Address = tuple[str, int]


@dataclass(slots=True)
class _Question:
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
    _questions: dict[int, _Question] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _last_number: int = 0

    def __len__(self) -> int:
        return len(self._questions)

    def check(self, name: str, owner: Address, engine_id: str, held: str) -> bool | None:
        """Whether `held` of engine `engine_id` is intact; None while the answer is open: call again.

        `name`: of the read. The first call asks, the one that returns an answer forgets the question."""
        number = self._numbers.get(name)
        if number is None:
            number = self._ask(name, owner, engine_id, held)
        self._receive(owner)
        question = self._questions[number]
        if question.answer is None and self.now() - question.asked_at < self.limit_s:
            return None
        del self._questions[number], self._numbers[name]
        return bool(question.answer)

    def _ask(self, name: str, owner: Address, engine_id: str, held: str) -> int:
        self._last_number += 1
        number = self._numbers[name] = self._last_number
        self._questions[number] = _Question(name, self.now(), owner)
        with contextlib.suppress(zmq.ZMQError):  # not sent: no answer arrives
            if owner not in self._sockets:
                self._close_idle()
                self._sockets[owner] = self.connect(*owner)
            self._sockets[owner].send_multipart((b"", check_message(engine_id, number, held)), zmq.DONTWAIT)
        return number

    def _receive(self, owner: Address) -> None:
        socket = self._sockets.get(owner)
        while socket is not None:
            try:
                parts = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            answer = answer_of(parts)
            if answer is not None and (question := self._questions.get(answer[0])) is not None:
                question.answer = answer[1] and question.owner == owner

    def _close_idle(self) -> None:
        if len(self._sockets) < _MAX_IDLE_OWNERS:
            return
        busy = {question.owner for question in self._questions.values()}
        for owner in [each for each in self._sockets if each not in busy]:
            self._sockets.pop(owner).close(0)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(0)
        self._sockets.clear()
