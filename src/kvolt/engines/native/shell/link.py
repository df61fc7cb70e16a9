"""The shell's end of the socket: commands out, answers in, calls with their replies.

Never blocks the loop: what the engine does not take at once waits in a buffer, which is bounded. Reads all that
comes at once, so the engine is not held up either, unless its steps are left lying (`hold_back`). Knows no
requests: what an answer means is up to who gets it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvolt.core.errors import DeadlineExceeded, KvoltError, Overloaded, from_info, to_info
from kvolt.engines.child_messages import FrameCutter, frame, raw
from kvolt.engines.native.shell.messages import (
    Answer,
    Call,
    Command,
    Method,
    Reply,
    Start,
    decode_answer,
)

R = TypeVar("R")

MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Of commands that the engine has not taken yet. Past it no requests and calls are taken; aborts always are."""


@dataclass(slots=True)
class _Waiting:
    """A call that was not answered yet."""

    method: Method[Any]
    reply: asyncio.Future[Any]
    """Cancelled when who waited gave up."""
    on_value: Callable[[Any], None] | None


class Link(asyncio.Protocol):
    """See the module. `on_answer` gets everything but replies; `on_lost` is called once, at the end."""

    def __init__(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        self.num_sent = 0
        """Commands so far; `Step.num_seen` counts the same."""
        self.lost = asyncio.Event()
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._cutter = FrameCutter()
        self._calls: dict[int, _Waiting] = {}
        self._num_calls = 0
        self._failure: KvoltError | None = None
        self._transport: asyncio.Transport | None = None
        self._held_back = False

    async def connect(self, end: socket.socket) -> None:
        """Takes over `end`."""
        end.setblocking(False)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        except BaseException:
            end.close()
            raise

    # --- out

    def start(self, message: Start) -> None:
        assert self._transport is not None
        self._transport.write(frame(message))

    def send(self, command: Command) -> int:
        """The command's number. Nothing is sent where nobody is there."""
        self.num_sent += 1
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(command))
        return self.num_sent

    def check_room(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_BUFFER_BYTES:
            raise Overloaded("the engine takes no commands now", queue="engine pipe", limit=MAX_BUFFER_BYTES)

    async def call(
        self, method: Method[R], *arguments: object, on_value: Callable[[R], None] | None = None
    ) -> R:
        """Errors as the engine raised them; DeadlineExceeded when it does not answer in the method's time.

        `on_value` is told of the answer in any case, also when the caller was cancelled meanwhile.
        """
        if self._failure is not None:
            raise from_info(to_info(self._failure))
        self.check_room()
        self._num_calls += 1
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = _Waiting(method, reply, on_value)
        self.send(Call(self._num_calls, method.name, raw(arguments)))
        try:
            async with asyncio.timeout(method.timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not answer {method.name}", stage="total", after_s=method.timeout_s
            ) from None

    def post(self, method: Method[Any], *arguments: object) -> None:
        """A call whose answer nobody waits for."""
        self.send(Call(0, method.name, raw(arguments)))

    def fail(self, error: KvoltError) -> None:
        """Nothing will be answered any more."""
        self._failure = error
        calls, self._calls = self._calls, {}
        for waiting in calls.values():
            if not waiting.reply.done():
                waiting.reply.set_exception(error)

    def hold_back(self, is_full: bool) -> None:
        """Stop reading, or go on: then the engine waits, at the latest when the socket is full as well."""
        if self._transport is None or self._transport.is_closing() or is_full == self._held_back:
            return
        self._held_back = is_full
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._cutter.feed(data):
            answer = decode_answer(message)
            if isinstance(answer, Reply):
                self._take_reply(answer)
            else:
                self._on_answer(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._on_lost()

    def _take_reply(self, answer: Reply) -> None:
        waiting = self._calls.pop(answer.number, None)
        if waiting is None:
            return
        reply = waiting.reply
        if answer.error is not None:
            if not reply.done():
                reply.set_exception(from_info(answer.error))
            return
        value = waiting.method.decode_value(answer.value)
        if waiting.on_value is not None:
            waiting.on_value(value)
        if not reply.done():
            reply.set_result(value)
