"""Loading progress as log lines: rate limited, and never out of date at the end."""

from __future__ import annotations

import asyncio
import logging

_EVERY_S = 2.0


class ProgressLines:
    """For one event loop. Writes the first line at once, and the latest of the following ones every
    `every_s`."""

    def __init__(self, log: logging.Logger, every_s: float = _EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._next: str | None = None
        self._written: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def report(self, text: str) -> None:
        self._next = text
        if self._timer is None:
            self._write()

    def close(self) -> None:
        """Write the pending line and stop."""
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write(self) -> None:
        self._timer = None
        if self._next is not None:
            self._flush()
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._write)

    def _flush(self) -> None:
        text, self._next = self._next, None
        if text is not None and text != self._written:
            self._written = text
            self._log.info("%s", text)
