"""LiveKeys: the keys of a store in memory, read again when the store changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvolt.core.errors import KvoltError
from kvolt.frontend.tenants.records import KeyRecords, KeyTable
from kvolt.frontend.tenants.store import KeyStore
from kvolt.runtime.blocking_lane import BlockingLane
from kvolt.runtime.clock import Blocking, SystemClock
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_READ_TIMEOUT_S = 10.0


class LiveKeys:
    """Current keys. A store that cannot be read leaves the previous keys in use; each problem is logged once."""

    def __init__(self, store: KeyStore, blocking: Blocking) -> None:
        self.table = KeyTable(KeyRecords(""))
        self.on_change: Callable[[KeyTable], None] = lambda table: None
        self._store = store
        self._lane = BlockingLane(blocking, SystemClock(), _READ_TIMEOUT_S)
        self._problem = ""
        self._task_group = TaskGroup("api-keys")

    async def start(self) -> None:
        """Read the store and follow it. Raises ConfigError if it cannot be read."""
        await self._read()
        self._task_group.start(self._follow(), "follow")

    async def close(self) -> None:
        await self._task_group.close()
        self._store.close()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self._read()
                self._problem = ""
            except Exception as error:  # the store of a plugin may raise anything
                problem = error.message if isinstance(error, KvoltError) else repr(error)
                if problem != self._problem:
                    self._problem = problem
                    log.error("API keys not read again, previous ones stay in use: reason=%s", problem)

    async def _read(self) -> None:
        version = self.table.version or None
        records = await self._lane.run(lambda: self._store.read(version))
        if records is None:
            return
        self.table = KeyTable(records)
        log.info("API keys read: tenants=%d keys=%d", len(records.tenants), len(records.keys))
        self.on_change(self.table)
