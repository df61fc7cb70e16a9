"""Download progress: the callback of fetchers, and an implementation that writes log lines.

Fetchers may report at any rate; the rate of log lines is limited here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvolt.runtime.clock import Clock, SystemClock

Progress = Callable[[str, int, int | None], None]
"""Arguments: name, bytes present, total bytes (None if unknown). The last report has all bytes."""

_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class ProgressLog:
    """A Progress that writes lines: the first report at once, then one every few seconds, and the last.

    Lines instead of a progress bar, because a supervisor merges the logs of many processes into one stream.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        every_s: float = _EVERY_S,
        write_line: Callable[[str], None] = _log.info,
    ) -> None:
        self._clock = clock or SystemClock()
        self._write_line = write_line
        self._every_s = every_s
        self._name: str | None = None
        self._started = (0.0, 0)
        self._written_at = 0.0
        self._is_complete = False

    def __call__(self, name: str, done_bytes: int, total_bytes: int | None) -> None:
        now = self._clock.monotonic()
        is_complete = done_bytes == total_bytes
        if name != self._name:
            self._name, self._started, self._written_at, self._is_complete = (
                name,
                (now, done_bytes),
                now,
                is_complete,
            )
            size = "" if total_bytes is None else f" ({size_text(total_bytes)})"
            here = f", {size_text(done_bytes)} already here" if 0 < done_bytes != total_bytes else ""
            self._write_line(f"fetching {name}{size}{here}")
            return
        if is_complete and not self._is_complete:
            self._is_complete = True
            self._write_line(f"fetched {name}{self._speed(now, done_bytes)}")
        elif not is_complete and now - self._written_at >= self._every_s:
            self._written_at = now
            share = f": {share_text(done_bytes, total_bytes)}" if done_bytes else ", still waiting"
            self._write_line(f"fetching {name}{share}{self._speed(now, done_bytes)}")

    def _speed(self, now: float, done_bytes: int) -> str:
        started_at, started_bytes = self._started
        if now <= started_at or done_bytes <= started_bytes:
            return ""
        return f", {size_text((done_bytes - started_bytes) / (now - started_at))}/s"


def size_text(num_bytes: float) -> str:
    """`97.5 MB`; decimal units, as the hub and PyPI show them."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def share_text(done_bytes: int, total_bytes: int | None) -> str:
    """`42 MB of 97.5 MB (43%)`."""
    if not total_bytes:
        return size_text(done_bytes)
    return f"{size_text(done_bytes)} of {size_text(total_bytes)} ({100 * done_bytes // total_bytes}%)"
