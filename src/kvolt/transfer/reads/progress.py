"""ProgressThread: event loop thread of an agent. All agent code except the public methods runs in it.

Sleeps until a socket is ready, a timer is due or a callback is queued. Long work such as copying many blocks runs in
short steps, so that it does not delay other events.
"""

from __future__ import annotations

import heapq
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvolt.runtime.clock import Clock

log = logging.getLogger(__name__)

_JOIN_S = 10.0
_MAX_WAIT_S = 3600.0
"""epoll takes milliseconds in 32 bits."""
_MIN_COMPACT_TIMERS = 1024


class Work(Protocol):
    """Work done in steps."""

    def step(self) -> bool:
        """Do one step; return whether there is more."""
        ...


class Timer:
    """Created by `ProgressThread.call_at`; `cancel` is idempotent."""

    __slots__ = ("callback", "when")

    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when

    def cancel(self) -> None:
        self.callback = None


class ProgressThread:
    """See the module. `call_soon` is thread-safe; all else is for its thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._callbacks: deque[Callable[[], None]] = deque()
        self._timers: list[Timer] = []
        self._compact_at = _MIN_COMPACT_TIMERS
        """Number of timers at which cancelled ones are removed."""
        self._tasks: deque[Work] = deque()
        self._is_closed = False
        self._lock = threading.Lock()
        """Makes closing atomic: a callback either runs or `call_soon` returns False."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, on_closed: Callable[[], None]) -> None:
        """Run `on_closed` in the thread and end it. Idempotent."""

        def end() -> None:
            try:
                on_closed()
            finally:
                with self._lock:
                    self._is_closed = True

        if self.call_soon(end):
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.error("progress thread did not end within %s s", _JOIN_S)

    def call_soon(self, function: Callable[[], None]) -> bool:
        """Queue a callback. Return False if the thread has ended."""
        with self._lock:
            if self._is_closed:
                return False
            self._callbacks.append(function)
            os.eventfd_write(self._wakeup, 1)
        return True

    def now(self) -> float:
        return self._clock.monotonic()

    def call_at(self, when: float, function: Callable[[], None]) -> Timer:
        if len(self._timers) >= self._compact_at:
            self._timers = [each for each in self._timers if each.callback is not None]
            heapq.heapify(self._timers)
            self._compact_at = max(2 * len(self._timers), _MIN_COMPACT_TIMERS)
        timer = Timer(when, function)
        heapq.heappush(self._timers, timer)
        return timer

    def schedule(self, work: Work) -> None:
        """Run step by step until done."""
        self._tasks.append(work)

    def watch(self, descriptor: int, events: int, on_ready: Callable[[int], None]) -> None:
        """Watch a descriptor, or change the events of a watched one."""
        try:
            self._selector.modify(descriptor, events, on_ready)
        except KeyError:
            self._selector.register(descriptor, events, on_ready)

    def unwatch(self, descriptor: int) -> None:
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            return

    def _run(self) -> None:
        while not self._is_closed:
            ready = self._selector.select(self._wait_s())
            if any(key.fd == self._wakeup for key, _ in ready):
                os.eventfd_read(self._wakeup)
            # Callbacks first: an offer must be registered before a peer presents its ticket.
            for _ in range(len(self._callbacks)):
                self._run_guarded(self._callbacks.popleft())
            for key, events in ready:
                if not self._is_watched(key) or self._run_guarded(partial(key.data, events)):
                    continue
                if self._is_watched(key):
                    self.unwatch(key.fd)  # or it would stay ready and spin
            while self._timers and (self._timers[0].callback is None or self._timers[0].when <= self.now()):
                timer = heapq.heappop(self._timers)
                if timer.callback is not None:
                    self._run_guarded(timer.callback)
            for _ in range(len(self._tasks)):
                self._run_step(self._tasks.popleft())
        while self._callbacks:  # queued before the end
            self._run_guarded(self._callbacks.popleft())
        self._selector.close()
        os.close(self._wakeup)

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        """False if unwatched since `select`, or if the descriptor number was reused."""
        known = self._selector.get_map().get(key.fd)
        return key.fd != self._wakeup and known is not None and known.data == key.data

    def _run_step(self, work: Work) -> None:
        def step() -> None:
            if work.step():
                self._tasks.append(work)

        self._run_guarded(step)

    def _wait_s(self) -> float | None:
        if self._tasks or self._callbacks:
            return 0.0
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        return min(max(self._timers[0].when - self.now(), 0.0), _MAX_WAIT_S) if self._timers else None

    def _run_guarded(self, function: Callable[[], None]) -> bool:
        """Run and log exceptions: a defect must not end the thread. Return whether it succeeded."""
        try:
            function()
        except Exception:
            log.exception("unexpected error in the progress thread")
            return False
        return True
