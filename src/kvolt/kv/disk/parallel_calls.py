"""ParallelCalls: runs calls that read or checksum bytes in parallel; sequential calls reach half the disk's
bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

_NUM_THREADS = 8


class ParallelCalls:
    """See the module. `close` after the last call."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run all calls and wait for them; raise the first error."""
        if len(calls) < 2:  # no thread needed
            for call in calls:
                call()
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-disk")
        started: list[Future[None]] = []
        try:
            for call in calls:
                started.append(self._threads.submit(call))  # not a comprehension: starting a thread may fail
        finally:
            wait(started)
        for each in started:
            each.result()
