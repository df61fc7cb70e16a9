"""Client of a running cluster."""

from __future__ import annotations

import weakref
from contextlib import AsyncExitStack
from typing import Self

from kvolt.api.cluster import Cluster, ProcessView, WorkerView, find_process, visit
from kvolt.api.loop_thread import LoopThread
from kvolt.core.endpoints import InstanceState
from kvolt.core.errors import Unavailable
from kvolt.core.request import Role
from kvolt.runtime.config.loader import Override, load
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.process_control import ProcessStatus

_DRAIN_S = 30.0


class Client:
    """Sees and operates a running cluster, found as `kvolt status` finds it.

        with Client() as cluster:
            for worker in cluster.workers():
                print(worker.process, worker.info.model, worker.state)

    Without arguments it reads kvolt.toml and the `KVOLT_*` variables and finds the cluster of this machine; `join` is
    the address of a join server, for clusters of several machines.

    The methods are synchronous: scripts and notebooks of operators call them a few times, they take milliseconds, and
    code on an event loop can use `asyncio.to_thread`. Requests to models go to the HTTP API (`urls`), with any OpenAI
    client.
    """

    def __init__(
        self,
        *,
        join: str | None = None,
        namespace: str | None = None,
        config: str | None = None,
        cluster_key: str | None = None,
    ) -> None:
        settings = {"discovery.join": join, "namespace": namespace, "cluster.key": cluster_key}
        overrides = [Override(key, text, key) for key, text in settings.items() if text is not None]
        loaded = load(file=config, overrides=overrides)
        self._connection = _Connection(loaded.settings)
        self._loop = LoopThread("Client")
        self._close = weakref.finalize(self, _close, self._loop, self._connection)
        try:
            self._loop.run(self._connection.open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect. Idempotent; leaving a `with` block does the same."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def workers(self) -> list[WorkerView]:
        """Registered workers with their models, roles and states."""
        return self._loop.run(self._cluster.list_workers())

    def models(self) -> list[str]:
        """Names of models and LoRA adapters that a ready worker serves."""
        names: set[str] = set()
        for worker in self.workers():
            if worker.state is InstanceState.READY and worker.info.role in (Role.AGGREGATED, Role.DECODE):
                names |= {worker.info.model, *worker.info.loras}
        return sorted(names)

    def urls(self) -> list[str]:
        """Base URLs of the frontends, without `/v1`."""
        return self._loop.run(self._cluster.list_urls())

    def status(self) -> list[ProcessView]:
        """Every process with the status it reports, as `kvolt status` shows them."""
        return self._loop.run(self._cluster.list_processes())

    def cordon(self, process: str) -> ProcessStatus:
        """Stop new requests to a process; running ones finish. `resume` undoes it."""
        return self._loop.run(_control(self._cluster, process, "cordon", 0.0))

    def drain(self, process: str, timeout_s: float = _DRAIN_S) -> ProcessStatus:
        """Stop new requests and wait until no stream is left, or for the timeout. The process keeps running.

        `process` is a name or an address of `status`. The returned status has the streams that are still active.
        """
        return self._loop.run(_control(self._cluster, process, "drain", timeout_s))

    def resume(self, process: str) -> ProcessStatus:
        """Accept new requests again after `cordon` or `drain`."""
        return self._loop.run(_control(self._cluster, process, "resume", 0.0))

    @property
    def _cluster(self) -> Cluster:
        cluster = self._connection.cluster
        if cluster is None:
            raise Unavailable("the client is closed", reason="closed")
        return cluster


class _Connection:
    """The visited cluster between `open` and `close`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.cluster: Cluster | None = None

    async def open(self) -> None:
        self.cluster = await self._stack.enter_async_context(visit(self._settings))

    async def close(self) -> None:
        self.cluster = None
        await self._stack.aclose()


def _close(loop: LoopThread, connection: _Connection) -> None:
    loop.close(connection.close())


async def _control(cluster: Cluster, process: str, verb: str, timeout_s: float) -> ProcessStatus:
    view = find_process(await cluster.list_processes(), process)
    return await cluster.control(view.address, verb, timeout_s)
