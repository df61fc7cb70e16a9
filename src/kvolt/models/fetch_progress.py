"""What is told while files are fetched: the callable that fetchers report to, and one that writes log lines.

A fetcher reports as often as it likes; how often anybody hears of it is decided here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvolt.runtime.clock import Clock, SystemClock

Progress = Callable[[str, int, int | None], None]
"""What is fetched, bytes that are here, bytes in all (None: not known). The last report has all of them."""

_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class ProgressLog:
    """A Progress in lines: the first report at once, then one every few seconds, and the last.

    They go to the log if nothing else is given. Lines and not a bar, because under a supervisor the logs of
    many processes are one stream.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        every_s: float = _EVERY_S,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        self._clock = clock or SystemClock()
        self._say = say
        self._every_s = every_s
        self._what: str | None = None
        self._begun = (0.0, 0)
        self._told_at = 0.0
        self._complete = False

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        now = self._clock.monotonic()
        complete = done_bytes == total_bytes
        if what != self._what:
            self._what, self._begun, self._told_at, self._complete = what, (now, done_bytes), now, complete
            size = "" if total_bytes is None else f" ({size_text(total_bytes)})"
            here = f", {size_text(done_bytes)} of it here already" if 0 < done_bytes != total_bytes else ""
            self._say(f"fetching {what}{size}{here}")
            return
        if complete and not self._complete:
            self._complete = True
            self._say(f"fetched {what}{self._speed(now, done_bytes)}")
        elif not complete and now - self._told_at >= self._every_s:
            self._told_at = now
            share = f": {share_text(done_bytes, total_bytes)}" if done_bytes else ", still waiting"
            self._say(f"fetching {what}{share}{self._speed(now, done_bytes)}")

    def _speed(self, now: float, done_bytes: int) -> str:
        begun_at, begun_bytes = self._begun
        if now <= begun_at or done_bytes <= begun_bytes:
            return ""
        return f", {size_text((done_bytes - begun_bytes) / (now - begun_at))}/s"


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
