"""SideBySide: calls that read or sum bytes, several at a time: a disk that is asked for one thing after the other gives
half of what it could, and so does one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

_AT_ONCE = 8


class SideBySide:
    """See the module. `close` it after the last."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """All of them; on return none moves a byte any more. Of their errors, the first."""
        if len(calls) < 2:  # no thread is needed for it
            for call in calls:
                call()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, "kv-disk")
        started: list[Future[None]] = []
        try:
            for call in calls:
                started.append(self._threads.submit(call))  # no comprehension: a thread may not be had
        finally:
            wait(started)
        for each in started:
            each.result()
