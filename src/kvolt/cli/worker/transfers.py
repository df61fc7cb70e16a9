"""The transfer agent of a process: made when the first worker of it moves KV, shared by all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial

from kvolt.core.card import Link
from kvolt.engines.contract import KvPlaced
from kvolt.runtime.config.settings import TransferSettings
from kvolt.runtime.network import split_address
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.paths.machine import look
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.worker.kv_moving import AgentMover, KvMover

TELL_EVERY_S = 10.0
"""A registration goes to everybody who watches: speeds that change in between wait for the next one."""
MAX_TOLD_LINKS = 32
"""In a registration: those that were used last."""

TellLinks = Callable[[dict[str, Link]], Awaitable[None]]


class Transfers:
    """`close` it before the memory that it moves."""

    def __init__(self, runtime: Runtime, settings: TransferSettings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._agent: TransferAgent | None = None
        self._crew = Crew("transfers")
        self._news = asyncio.Event()
        self._listeners: list[TellLinks] = []

    @property
    def paths(self) -> PathWatch | None:
        """None while nothing moves KV."""
        return self._agent.paths if self._agent is not None else None

    @property
    def started_agent(self) -> TransferAgent | None:
        """None while nothing moves KV."""
        return self._agent

    def mover(self, engine: KvPlaced) -> KvMover:
        return AgentMover(self.agent(), engine.kv_slabs())

    def agent(self) -> TransferAgent:
        """Of the process."""
        if self._agent is None:
            self._agent = self._new_agent()
            loop = asyncio.get_running_loop()
            self._agent.paths.on_news = partial(loop.call_soon_threadsafe, self._news.set)
            self._crew.start(self._tell_links(self._agent.paths), "links")
        return self._agent

    def _new_agent(self) -> TransferAgent:
        listen, told = self._runtime.options.listen, self._runtime.plane.address
        options = TransferOptions(
            host=split_address(listen)[0],
            advertise=split_address(told or listen)[0],
            shared_memory=self._settings.shared_memory,
            nixl=self._settings.nixl,
            self_test=self._settings.self_test,
        )
        return TransferAgent(options, self._runtime.ports.clock, look(os.environ))

    def tell(self, listener: TellLinks) -> None:
        """Whoever registers what was measured."""
        self._listeners.append(listener)

    async def _tell_links(self, paths: PathWatch) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            for listener in self._listeners:
                await listener(paths.links(MAX_TOLD_LINKS))
            await asyncio.sleep(TELL_EVERY_S)

    async def close(self) -> None:
        await self._crew.close()
        if self._agent is not None:
            self._agent.close()  # what is under way is told to the loop, which is still there
