"""Progress: the one thread that moves an agent's bytes. Everything of an agent but its public calls runs in it.

It sleeps until a socket is ready, a time has come or somebody calls. Work that takes long, a copy of many blocks, is
done a part at a turn, so that nothing else waits long for it.
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
_MOST_WAIT_S = 3600.0
"""The kernel counts milliseconds in 32 bits."""
_FEW_TIMERS = 1024


class Work(Protocol):
    """Something that is done in turns."""

    def turn(self) -> bool:
        """Do a part of it; whether there is more."""
        ...


class Timer:
    """Of `Progress.at`; may be cancelled any number of times."""

    __slots__ = ("at", "call")

    def __init__(self, at: float, call: Callable[[], None]) -> None:
        self.at = at
        self.call: Callable[[], None] | None = call

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at

    def cancel(self) -> None:
        self.call = None


class Progress:
    """See the module. `call` may be called from anywhere; all else in its thread only."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[Timer] = []
        self._most_timers = _FEW_TIMERS
        """Before those that were cancelled are thrown out."""
        self._work: deque[Work] = deque()
        self._is_over = False
        self._lock = threading.Lock()
        """Around the end: whoever calls is heard, or told that nobody listens."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, last: Callable[[], None]) -> None:
        """`last` is called in the thread, which then ends. Not an error for one that has."""

        def end() -> None:
            try:
                last()
            finally:
                with self._lock:
                    self._is_over = True

        if self.call(end):
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.error("the thread that moves blocks has not ended within %s s", _JOIN_S)

    def call(self, function: Callable[[], None]) -> bool:
        """Soon, in the thread; whether it has not ended."""
        with self._lock:
            if self._is_over:
                return False
            self._calls.append(function)
            os.eventfd_write(self._bell, 1)
        return True

    def now(self) -> float:
        return self._clock.monotonic()

    def at(self, when: float, function: Callable[[], None]) -> Timer:
        if len(self._timers) >= self._most_timers:
            self._timers = [each for each in self._timers if each.call is not None]
            heapq.heapify(self._timers)
            self._most_timers = max(2 * len(self._timers), _FEW_TIMERS)
        timer = Timer(when, function)
        heapq.heappush(self._timers, timer)
        return timer

    def work(self, work: Work) -> None:
        """Turn by turn until it is done."""
        self._work.append(work)

    def watch(self, descriptor: int, events: int, on_ready: Callable[[int], None]) -> None:
        """From now on; with other events again for a descriptor that is watched."""
        try:
            self._selector.modify(descriptor, events, on_ready)
        except KeyError:
            self._selector.register(descriptor, events, on_ready)

    def forget(self, descriptor: int) -> None:
        try:
            self._selector.unregister(descriptor)
        except (KeyError, ValueError):
            return

    def _run(self) -> None:
        while not self._is_over:
            ready = self._selector.select(self._wait_s())
            if any(key.fd == self._bell for key, _ in ready):
                os.eventfd_read(self._bell)
            # Calls first: an offer must be known before somebody who was given its ticket asks for it.
            for _ in range(len(self._calls)):
                self._guarded(self._calls.popleft())
            for key, events in ready:
                if not self._is_watched(key) or self._guarded(partial(key.data, events)):
                    continue
                if self._is_watched(key):
                    self.forget(key.fd)  # it would be ready again at once, for ever
            while self._timers and (self._timers[0].call is None or self._timers[0].at <= self.now()):
                timer = heapq.heappop(self._timers)
                if timer.call is not None:
                    self._guarded(timer.call)
            for _ in range(len(self._work)):
                self._turn(self._work.popleft())
        while self._calls:  # that came before the end: each finds out for itself
            self._guarded(self._calls.popleft())
        self._selector.close()
        os.close(self._bell)

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        """And is not another's by now, whose descriptor has got the number of one that was closed a moment ago."""
        known = self._selector.get_map().get(key.fd)
        return key.fd != self._bell and known is not None and known.data == key.data

    def _turn(self, work: Work) -> None:
        def turn() -> None:
            if work.turn():
                self._work.append(work)

        self._guarded(turn)

    def _wait_s(self) -> float | None:
        if self._work or self._calls:
            return 0.0
        while self._timers and self._timers[0].call is None:
            heapq.heappop(self._timers)
        return min(max(self._timers[0].at - self.now(), 0.0), _MOST_WAIT_S) if self._timers else None

    def _guarded(self, function: Callable[[], None]) -> bool:
        """A defect must not end the thread that everybody's blocks depend on. Whether there was none."""
        try:
            function()
        except Exception:
            log.exception("a defect in the thread that moves blocks")
            return False
        return True
