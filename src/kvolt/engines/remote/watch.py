"""Watch: whether a server is there and how busy it is, asked about once a second.

    there --- connection refused, 503, or `away_after` probes without an answer ---> away
    away  --- healthy, and what it serves is what it served ---> there

Owns that question and its timing. What follows from an answer is the engine's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvolt.core.errors import ConfigError, ConnectFailed, DeadlineExceeded, KvoltError
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.figures import Figures, read_figures
from kvolt.engines.remote.server import ServerFacts, inspect
from kvolt.runtime.http.client import HttpClient

log = logging.getLogger(__name__)


class Watch:
    """`run` until it is cancelled. `on_away` gets the reason and the loop's time since when nothing was heard."""

    def __init__(
        self,
        client: HttpClient,
        arguments: RemoteArguments,
        facts: ServerFacts,
        on_figures: Callable[[Figures], None],
        on_away: Callable[[str, float], None],
        on_back: Callable[[], None],
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._facts = facts
        self._on_figures = on_figures
        self._on_away = on_away
        self._on_back = on_back
        self._away: str | None = None
        self._num_silent = 0
        self._silent_since = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._arguments.probe_interval_s)
            try:
                await self.look()
            except Exception:  # whatever it says of itself: it may say better the next time
                log.exception("%s could not be looked at", self._client.url.text)

    async def look(self) -> None:
        """Once."""
        began_at = self._client.now()
        reason, is_certain = await self._probe()
        if reason is None and self._away is not None:
            reason = await self._differs()
            is_certain = True
        if reason is None:
            self._num_silent = 0
            if self._away is not None:
                log.info("%s is back", self._client.url.text)
                self._away = None
                self._on_back()
            await self._read_figures()
            return
        if not self._num_silent:
            self._silent_since = began_at
        self._num_silent += 1
        if not is_certain and self._num_silent < self._arguments.away_after:
            return
        if reason != self._away:
            log.warning("%s is away: %s", self._client.url.text, reason)
        was_away, self._away = self._away is not None, reason
        if not was_away:
            self._on_away(reason, self._silent_since)

    async def _probe(self) -> tuple[str | None, bool]:
        """Why it is not well, and whether that is for certain."""
        try:
            found = await self._client.fetch("/health", self._arguments.probe_timeout_s)
        except ConnectFailed as error:
            return error.message, True
        except KvoltError as error:
            return error.message, False
        if found.status == 200:
            return None, True
        return f"/health says {found.status}", found.status == 503

    async def _differs(self) -> str | None:
        """Whether another server than the one that was attached answers now; why it cannot take its place."""
        try:
            facts = await inspect(self._client, self._arguments, self._facts.model)
        except ConfigError as error:
            return error.message
        except KvoltError as error:
            return f"it does not say what it serves: {error.message}"
        if not facts.is_same(self._facts):
            return f"it serves {facts.model} now, in blocks of {facts.block_size}: attach it anew"
        return None

    async def _read_figures(self) -> None:
        try:
            found = await self._client.fetch("/metrics", self._arguments.probe_timeout_s)
        except (DeadlineExceeded, KvoltError):
            return  # its health is asked again anyway
        if found.status == 200 and (figures := read_figures(found.body.decode(errors="replace"))) is not None:
            self._on_figures(figures)
