"""Transfer agent of a process, created at the first use and shared by its workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial

from kvolt.core.card import MeasuredLink
from kvolt.engines.contract import KvAddressable
from kvolt.runtime.config.settings import TransferSettings
from kvolt.runtime.network import split_address
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.paths.machine import probe_machine
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.worker.kv.mover import AgentMover, KvMover

LINKS_INTERVAL_S = 10.0
"""Minimum time between updates of the registered link speeds, which all watchers receive."""
MAX_LINKS = 32
"""Maximum number of links in a registration: the most recently used."""

LinksListener = Callable[[dict[str, MeasuredLink]], Awaitable[None]]


class Transfers:
    """Creates the agent and reports measured link speeds. Close it before the memory that it transfers."""

    def __init__(self, runtime: Runtime, settings: TransferSettings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._agent: TransferAgent | None = None
        self._task_group = TaskGroup("transfers")
        self._changed = asyncio.Event()
        self._listeners: list[LinksListener] = []

    @property
    def paths(self) -> PathWatch | None:
        """Path statistics; None before the agent is created."""
        return self._agent.paths if self._agent is not None else None

    @property
    def started_agent(self) -> TransferAgent | None:
        """The agent, if it was created."""
        return self._agent

    def mover(self, engine: KvAddressable) -> KvMover:
        return AgentMover(self.agent(), engine.kv_slabs())

    def agent(self) -> TransferAgent:
        """Return the agent of the process; create it at the first call."""
        if self._agent is None:
            self._agent = self._new_agent()
            loop = asyncio.get_running_loop()
            self._agent.paths.on_speed_change = partial(loop.call_soon_threadsafe, self._changed.set)
            self._task_group.start(self._report_links(self._agent.paths), "links")
        return self._agent

    def _new_agent(self) -> TransferAgent:
        listen, advertised = self._runtime.options.listen, self._runtime.plane.address
        options = TransferOptions(
            host=split_address(listen)[0],
            advertise=split_address(advertised or listen)[0],
            shared_memory=self._settings.shared_memory,
            nixl=self._settings.nixl,
            self_test=self._settings.self_test,
        )
        ports = self._runtime.ports
        return TransferAgent(options, ports.clock, probe_machine(os.environ), ports.credentials)

    def add_listener(self, listener: LinksListener) -> None:
        """Call `listener` with the measured links when they change."""
        self._listeners.append(listener)

    async def _report_links(self, paths: PathWatch) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for listener in self._listeners:
                await listener(paths.links(MAX_LINKS))
            await asyncio.sleep(LINKS_INTERVAL_S)

    async def close(self) -> None:
        await self._task_group.close()
        if self._agent is not None:
            self._agent.close()  # ends running operations on the loop, which still runs
