"""Whether a join server can be reached, as its client's tasks find out; and how long they wait between tries."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

log = logging.getLogger(__name__)

_RETRY_FIRST_S = 0.1


class Backoff:
    """The pauses between tries: doubled each time, never twice the same for two processes."""

    def __init__(self, rng: random.Random, max_s: float) -> None:
        self._rng = rng
        self._max_s = max_s
        self._pause_s = _RETRY_FIRST_S

    def reset(self) -> None:
        self._pause_s = _RETRY_FIRST_S

    async def pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, self._max_s)
        await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))


class ServerState:
    """Lost as soon as one task fails, back when none does any more; each is said once."""

    def __init__(self, address: str, on_state: Callable[[bool], None] | None) -> None:
        self._address = address
        self._on_state = on_state
        self._works: dict[str, bool] = {}
        self._connected: bool | None = None

    def failed(self, task: str, reason: str) -> None:
        self._works[task] = False
        if self._connected is not False:
            log.warning("%s; going on with what is known", reason)
            self._turn(connected=False)

    def works(self, task: str) -> None:
        self._works[task] = True
        self._turn_if_all_work()

    def forget(self, task: str) -> None:
        """The task is over; what it found out says nothing any more."""
        self._works.pop(task, None)
        self._turn_if_all_work()

    def _turn_if_all_work(self) -> None:
        if self._connected or not self._works or not all(self._works.values()):
            return
        if self._connected is False:
            log.warning("join server %s is back", self._address)
        self._turn(connected=True)

    def _turn(self, connected: bool) -> None:
        self._connected = connected
        if self._on_state is not None:
            self._on_state(connected)
