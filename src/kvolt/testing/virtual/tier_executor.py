"""Tier executor of a virtual process: calls take virtual time and run on the loop, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvolt.kv.tiers.tier_thread import EXECUTORS

Value = TypeVar("Value")

_CALL_S = 0.002


class VirtualExecutor:
    """A `TierExecutor` without a thread: each call takes `_CALL_S`, one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._clock_s = 0.0

    def now(self) -> float:
        """Clock in which every call takes the same time, on any machine."""
        self._clock_s += _CALL_S
        return self._clock_s

    def submit(self, call: Callable[[], Value], /) -> Future[Value]:
        done: Future[Value] = Future()
        self._calls.append((done, call))
        self._set_timer()
        return done

    async def end(self) -> None:
        while self._calls:
            self._run_next()
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if self._timer is None and self._calls:
            self._timer = asyncio.get_running_loop().call_later(_CALL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._run_next()
        self._set_timer()

    def _run_next(self) -> None:
        done, call = self._calls.popleft()
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)


def without_threads() -> None:
    """Use VirtualExecutor for tier threads in the current context."""
    EXECUTORS.set(VirtualExecutor)
