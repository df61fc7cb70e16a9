"""One log line for each request that ends, within a rate: a log too fast to read must cost no CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

LINES_PER_S = 10.0
_MAX_BURST = 20.0


class RequestLog:
    """Writes `request finished` lines. Above the rate requests are counted, and the next line has their number."""

    def __init__(self) -> None:
        self._tokens = _MAX_BURST
        self._refilled_at: float | None = None
        self._num_skipped = 0

    def write(self, now: float, describe: Callable[[], dict[str, object]]) -> None:
        """Log a request at `now`. `describe` returns its fields; it is called only if the line is written."""
        if not log.isEnabledFor(logging.INFO):
            return
        if self._refilled_at is not None:
            self._tokens = min(_MAX_BURST, self._tokens + (now - self._refilled_at) * LINES_PER_S)
        self._refilled_at = now
        if self._tokens < 1.0:
            self._num_skipped += 1
            return
        self._tokens -= 1.0
        fields = describe()
        if self._num_skipped:
            fields["not_logged_before"], self._num_skipped = self._num_skipped, 0
        pairs = " ".join(f"{name}=%r" if name == "error" else f"{name}=%s" for name in fields)
        log.info(f"request finished: {pairs}", *fields.values())
