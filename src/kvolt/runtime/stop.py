"""Process shutdown: stop signals and graceful stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_STEP_TIMEOUT_S = 5.0

Step = Callable[[], Awaitable[object]]


def exit_at_once(code: int) -> None:
    """End this process immediately, without cleanup."""
    os._exit(code)


class StopSignal:
    """Graceful stop at the first SIGTERM or SIGINT, immediate exit at the second.

    Without `install` it is a plain event, for tests and for processes that stop by themselves. Only signals count as
    a second one: a stop requested in code may be followed by one signal.
    """

    def __init__(self, exit_now: Callable[[int], None] = exit_at_once) -> None:
        self._exit_now = exit_now
        self._event = asyncio.Event()
        self._reason: str | None = None
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why the stop was requested; the first reason wins."""
        return self._reason

    def request_stop(self, reason: str) -> None:
        """Request a graceful stop. Idempotent."""
        if self._reason is None:
            self._reason = reason
            self._event.set()

    async def wait(self) -> str:
        """Wait for a stop request and return its reason."""
        await self._event.wait()
        assert self._reason is not None
        return self._reason

    def install(self) -> None:
        """Install the signal handlers on the running loop (main thread only)."""
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.getsignal(number)
            self._loop.add_signal_handler(number, self._on_signal, number)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for number, handler in self._previous_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("stop requested: signal=%s; a second signal exits immediately", number.name)
            self.request_stop(number.name)
            return
        log.warning("second stop signal: signal=%s; exiting immediately", number.name)
        self._exit_now(128 + number)


async def graceful_stop(stop_accepting: Step, drain: Step, cancel: Step, drain_timeout_s: float) -> bool:
    """Stop accepting work, drain until the deadline, cancel the rest. Returns True if nothing was cancelled.

    `cancel` is always called, also after a complete drain, a failed step or a cancellation of this call, and must be
    idempotent. The error of a failed step is raised after all three steps.
    """
    drained = False
    try:
        log.debug("no longer accepting work")
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            await stop_accepting()
    finally:
        try:
            log.debug("draining: timeout=%g s", drain_timeout_s)
            drained = await _finishes_within(drain, drain_timeout_s)
        finally:
            if drained:
                log.info("drained")
            else:
                log.warning("drain timed out; cancelling remaining work")
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await cancel()
    return drained


async def _finishes_within(step: Step, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await step()
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True
