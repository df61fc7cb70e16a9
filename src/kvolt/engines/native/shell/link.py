"""EngineLink: the shell's end of the socket. Sends commands, receives messages, matches replies to calls.

Never blocks the loop: unsent data is buffered, up to a limit. Reads everything at once, so that the engine is
not blocked either, unless reading is paused (`set_paused`). Knows no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvolt.core.errors import DeadlineExceeded, KvoltError, Overloaded, from_info, to_info
from kvolt.engines.engine_process import MessageLink
from kvolt.engines.framing import encode_raw
from kvolt.engines.native.shell.messages import (
    Answer,
    Call,
    Command,
    Method,
    Reply,
    decode_answer,
)

R = TypeVar("R")

MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Most unsent bytes of commands. Beyond it requests and calls are rejected; aborts are always sent."""


@dataclass(slots=True)
class _Waiting:
    """A call waiting for its reply."""

    method: Method[Any]
    reply: asyncio.Future[Any]
    """Cancelled if the caller gave up."""
    on_value: Callable[[Any], None] | None


class EngineLink(MessageLink):
    """See the module. `on_answer` gets all messages except replies; `on_lost` is called once, at the end."""

    def __init__(self, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        super().__init__(self._on_message)
        self.num_sent = 0
        """Commands sent; `Step.num_seen` counts the same."""
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._calls: dict[int, _Waiting] = {}
        self._num_calls = 0
        self._failure: KvoltError | None = None
        self._is_paused = False

    # --- outgoing

    def command(self, command: Command) -> int:
        """Send a command and return its number. Sends nothing if the connection is closed."""
        self.num_sent += 1
        self.send(command)
        return self.num_sent

    def check_room(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_BUFFER_BYTES:
            raise Overloaded(
                "the engine's command buffer is full", queue="engine pipe", limit=MAX_BUFFER_BYTES
            )

    async def call(
        self, method: Method[R], *arguments: object, on_value: Callable[[R], None] | None = None
    ) -> R:
        """Raises the engine's error, or DeadlineExceeded if the reply takes longer than the method's timeout.

        `on_value` is called with the result in any case, even if the caller was cancelled.
        """
        if self._failure is not None:
            raise from_info(to_info(self._failure))
        self.check_room()
        self._num_calls += 1
        command = Call(self._num_calls, method.name, encode_raw(arguments))  # may fail: nothing waits yet
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = _Waiting(method, reply, on_value)
        self.command(command)
        try:
            async with asyncio.timeout(method.timeout_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine did not answer {method.name}", stage="total", after_s=method.timeout_s
            ) from None

    def post(self, method: Method[Any], *arguments: object) -> None:
        """A call whose reply is ignored."""
        self.command(Call(0, method.name, encode_raw(arguments)))

    def fail(self, error: KvoltError) -> None:
        """Fail all pending and future calls."""
        self._failure = error
        calls, self._calls = self._calls, {}
        for waiting in calls.values():
            if not waiting.reply.done():
                waiting.reply.set_exception(error)

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume reading. While paused the engine blocks once the socket buffer is full."""
        if self._transport is None or self._transport.is_closing() or is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # --- incoming

    def _on_message(self, message: memoryview) -> None:
        answer = decode_answer(message)
        if isinstance(answer, Reply):
            self._on_reply(answer)
        else:
            self._on_answer(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost()

    def _on_reply(self, answer: Reply) -> None:
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
