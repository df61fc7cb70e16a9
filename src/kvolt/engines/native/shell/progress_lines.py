"""What loading is at, as log lines: as soon as it changes, but not too often, and never an old one last."""

from __future__ import annotations

import asyncio
import logging

_EVERY_S = 2.0


class ProgressLines:
    """For one loop. The first line is written at once; of those that follow fast, the last when its time comes."""

    def __init__(self, log: logging.Logger, every_s: float = _EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._next: str | None = None
        self._written: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, text: str) -> None:
        self._next = text
        if self._timer is None:
            self._write()

    def close(self) -> None:
        """Write what waits, and no more by itself."""
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
