"""State of a discovery store as seen by its client, and the client's retry back-off."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.1


class Backoff:
    """Pauses between attempts: exponential, with jitter."""

    def __init__(self, rng: random.Random, max_s: float) -> None:
        self._rng = rng
        self._max_s = max_s
        self._pause_s = _RETRY_FIRST_S

    def reset(self) -> None:
        self._pause_s = _RETRY_FIRST_S

    async def pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self._max_s)
        await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))


class StoreState:
    """Whether a store is reachable: lost as soon as one task fails, restored when none fails; each change is reported
    once."""

    def __init__(self, store: str, on_state: Callable[[bool], None] | None) -> None:
        self._store = store
        self._on_state = on_state
        self._works: dict[str, bool] = {}
        self._connected: bool | None = None

    def is_failing(self, task: str) -> bool:
        return self._works.get(task) is False

    def mark_failed(self, task: str, reason: str) -> None:
        self._works[task] = False
        if self._connected is not False:
            if self._connected is None:
                log.warning("discovery unreachable: %s reason=%s; retrying", self._store, reason)
            else:
                log.warning("discovery lost: %s reason=%s; using the last known state", self._store, reason)
            self._set_connected(connected=False)

    def mark_working(self, task: str) -> None:
        self._works[task] = True
        self._set_connected_if_all_work()

    def remove_task(self, task: str) -> None:
        """Remove a finished task from the state."""
        self._works.pop(task, None)
        self._set_connected_if_all_work()

    def _set_connected_if_all_work(self) -> None:
        if self._connected or not self._works or not all(self._works.values()):
            return
        if self._connected is False:
            log.warning("discovery restored: %s", self._store)
        self._set_connected(connected=True)

    def _set_connected(self, connected: bool) -> None:
        self._connected = connected
        if self._on_state is not None:
            self._on_state(connected)
