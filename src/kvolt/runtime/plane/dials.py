"""Connection attempts of the `tcp` plane: concurrent callers for one address share one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvolt.core.errors import ConnectFailed, KvoltError, WorkerLost
from kvolt.runtime.logs import unbind
from kvolt.runtime.network import Network
from kvolt.runtime.plane.connection import Connection
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.tasks import TaskGroup

_DIAL_S = 5.0


class Dials:
    """Dials that have not ended, by address."""

    def __init__(
        self,
        network: Network,
        stats: PlaneStats,
        task_group: TaskGroup,
        create: Callable[[], Connection],
        use: Callable[[Connection, str], None],
        discard: Callable[[Connection], None],
    ) -> None:
        """`use` gets a ready connection and its address, `discard` one that was created and failed."""
        self._network = network
        self._stats = stats
        self._task_group = task_group
        self._create = create
        self._use = use
        self._discard = discard
        self._dialing: dict[str, asyncio.Future[Connection]] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._hello_waiters: dict[Connection, asyncio.Future[None]] = {}

    async def connect(self, address: str, timeout_s: float) -> Connection:
        """A new ready connection to the address. Raises ConnectFailed when there is none in time."""
        dial = self._dialing.get(address)
        if dial is None:
            dial = asyncio.get_running_loop().create_future()
            self._dialing[address] = dial
            # A short time-out of the first caller must not fail the others that share the dial.
            work = self._dial(address, dial, max(timeout_s, _DIAL_S))
            with unbind():  # the connection's log records do not belong to the request that dialed it
                self._tasks[address] = self._task_group.start(work, f"dial {address}")
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial)
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None

    def wake(self, connection: Connection) -> None:
        """Continue the dial of a connection that got its hello or was closed."""
        waiter = self._hello_waiters.pop(connection, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cancel(self, address: str, connection: Connection) -> None:
        """Cancel a dial: a connection to the address answers again."""
        dial, task = self._dialing.get(address), self._tasks.get(address)
        if dial is None or task is None:
            return
        self._remove(address, dial)  # here, because a task cancelled before its first step runs no cleanup
        if not dial.done():
            dial.set_result(connection)
        task.cancel()

    def _remove(self, address: str, dial: asyncio.Future[Connection]) -> None:
        """Remove a dial unless another one has replaced it."""
        if self._dialing.get(address) is dial:
            del self._dialing[address]
            self._tasks.pop(address, None)

    async def _dial(self, address: str, dial: asyncio.Future[Connection], timeout_s: float) -> None:
        connection: Connection | None = None
        created: list[Connection] = []

        def factory() -> Connection:
            created.append(self._create())
            return created[-1]

        try:
            async with asyncio.timeout(timeout_s):
                await self._network.connect(address, factory, timeout_s)
                connection = created[-1]
                if connection.session.peer is None and connection.closed is None:
                    waiter = self._hello_waiters[connection] = asyncio.get_running_loop().create_future()
                    await waiter
            if connection.closed is not None:
                raise connection.closed
        except TimeoutError:
            self._fail(dial, address, created, ConnectFailed(f"{address} sent no hello", address=address))
        except KvoltError as error:
            self._fail(dial, address, created, error)
        except asyncio.CancelledError:
            self._fail(dial, address, created, ConnectFailed("this process is stopping", address=address))
            raise
        except Exception as error:  # e.g. a name that the resolver rejects: waiters must get an error
            reason = f"cannot connect to {address}: {error}"
            self._fail(dial, address, created, ConnectFailed(reason, address=address))
        else:
            self._stats.connects["ok"] += 1
            self._remove(address, dial)
            self._use(connection, address)
            if not dial.done():
                dial.set_result(connection)
        finally:
            self._remove(address, dial)
            for connection in created:
                self._hello_waiters.pop(connection, None)

    def _fail(
        self, dial: asyncio.Future[Connection], address: str, created: list[Connection], error: KvoltError
    ) -> None:
        self._stats.connects[error.code] += 1
        self._remove(address, dial)
        for connection in created:
            if connection.closed is None:
                connection.abort(error)
            self._discard(connection)
        if isinstance(error, WorkerLost):  # nothing was sent yet
            error = ConnectFailed(f"{address} closed the connection", address=address)
        if not dial.done():
            dial.set_exception(error)
            dial.exception()  # mark as retrieved: a dial without waiters is no error
