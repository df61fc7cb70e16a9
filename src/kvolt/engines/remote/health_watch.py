"""Availability and load of a server, probed periodically.

available --- connection refused, 503, or `away_after` failed probes ---> away
away --- healthy, and serves the same model and blocks ---> available
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvolt.core.errors import ConfigError, ConnectFailed, DeadlineExceeded, KvoltError
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.server import ServerFacts, inspect
from kvolt.engines.remote.server_load import ServerStats, read_stats
from kvolt.runtime.http.client import HttpClient

log = logging.getLogger(__name__)


class HealthWatch:
    """Call `run` until cancelled. `on_away` gets the reason and the loop time of the first failed probe."""

    def __init__(
        self,
        client: HttpClient,
        arguments: RemoteArguments,
        facts: ServerFacts,
        on_stats: Callable[[ServerStats], None],
        on_away: Callable[[str, float], None],
        on_back: Callable[[], None],
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._facts = facts
        self._on_stats = on_stats
        self._on_away = on_away
        self._on_back = on_back
        self._away: str | None = None
        self._num_silent = 0
        self._silent_since = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._arguments.probe_interval_s)
            try:
                await self.probe_once()
            except Exception:  # for example a malformed response; the next probe may succeed
                log.exception("server probe failed: url=%s", self._client.url.text)

    async def probe_once(self) -> None:
        began_at = self._client.now()
        reason, is_certain = await self._probe()
        if reason is None and self._away is not None:
            reason = await self._differs()
            is_certain = True
        if reason is None:
            self._num_silent = 0
            if self._away is not None:
                log.info("server available: url=%s", self._client.url.text)
                self._away = None
                self._on_back()
            await self._read_stats()
            return
        if not self._num_silent:
            self._silent_since = began_at
        self._num_silent += 1
        if not is_certain and self._num_silent < self._arguments.away_after:
            return
        if reason != self._away:
            log.warning("server away: url=%s reason=%s", self._client.url.text, reason)
        was_away, self._away = self._away is not None, reason
        if not was_away:
            self._on_away(reason, self._silent_since)

    async def _probe(self) -> tuple[str | None, bool]:
        """Reason why the server is unhealthy, and whether that is certain."""
        try:
            response = await self._client.fetch("/health", self._arguments.probe_timeout_s)
        except ConnectFailed as error:
            return error.message, True
        except KvoltError as error:
            return error.message, False
        if response.status == 200:
            return None, True
        return f"/health returned {response.status}", response.status == 503

    async def _differs(self) -> str | None:
        """Reason why the server that answers now cannot replace the attached one; None if it can."""
        try:
            facts = await inspect(self._client, self._arguments, self._facts.model)
        except ConfigError as error:
            return error.message
        except KvoltError as error:
            return f"its model is unknown: {error.message}"
        if not facts.is_same(self._facts):
            return f"it now serves {facts.model} with block size {facts.block_size}: restart this worker"
        return None

    async def _read_stats(self) -> None:
        try:
            response = await self._client.fetch("/metrics", self._arguments.probe_timeout_s)
        except (DeadlineExceeded, KvoltError):
            return  # the next probe checks its health
        if (
            response.status == 200
            and (stats := read_stats(response.body.decode(errors="replace"))) is not None
        ):
            self._on_stats(stats)
