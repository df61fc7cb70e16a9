"""PoolLink: a worker's connection to the pool of its host: made when it is needed, given up when it is silent."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvolt.core.errors import KvoltError, NetworkFault, TransferFailed, from_info
from kvolt.core.ids import InstanceId
from kvolt.kv.shared_pool.wire import (
    Answer,
    Answered,
    Asked,
    Hello,
    Met,
    Question,
    Refused,
    frame,
    read_frame,
)
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_MOST_SILENT = 3
"""Questions in a row without an answer in time, after which a pool is held to be gone."""
_AGAIN_S = 2.0
"""After the pool was not there, before it is looked for again."""
_HELLO_S = 35.0
"""For a pool to begin, which reads a disk."""

Expected = TypeVar("Expected", bound=Answer)


class PoolLink:
    """A connection to a pool, made when it is needed."""

    def __init__(self, path: Path, shape: BlockShape | None, now: Callable[[], float]) -> None:
        """`shape`: of who stores and reads; None for who only asks how it is."""
        self._path = path
        self._shape = shape
        self._now = now
        self.on_lost: Callable[[], None] = lambda: None
        self.on_late: Callable[[Answer], None] = lambda _: None
        """Told of an answer that nobody waits for any more."""
        self.pool: InstanceId | None = None
        """Under which name the pool that we are connected to tells of its blocks."""
        self.on_pool: Callable[[], None] = lambda: None
        """Told when that is another, or none."""
        self._is_lost = asyncio.Event()
        self._num_silent = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._not_before = float("-inf")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._crew = Crew("kv pool's link")

    async def connect(self) -> None:
        """NetworkFault where it is not there, ConfigError where it is for others."""
        async with self._connecting:
            if self._writer is not None:
                return
            if self._crew.closed or self._now() < self._not_before:
                raise NetworkFault(f"no pool answers at {self._path}")
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                self._not_before = self._now() + _AGAIN_S
                raise NetworkFault(
                    f"no pool answers at {self._path}: {error.strerror or error}",
                    remedy="start it: `kvolt cache serve`",
                ) from None
            self._writer = writer
            self._is_lost.clear()
            self._crew.start(self._listen(reader, writer), "listen")
            if self._shape is None:
                return
            try:
                met = await self._ask(Hello(self._shape), Met)
            except BaseException:
                self._hang_up(writer)
                raise
            if self._writer is writer:  # and it has not gone at once
                self._reaches(met.pool)

    def stay(self) -> None:
        """From now on look for the pool whenever it is not there, and not only when it is needed: routers send us
        prompts for what it has."""
        self._crew.start(self._stay(), "stay")

    async def _stay(self) -> None:
        told = ""
        while True:
            try:
                async with asyncio.timeout(_HELLO_S):
                    await self.connect()
                told = ""
                await self._is_lost.wait()
            except NetworkFault:
                pass  # it is away
            except (KvoltError, TimeoutError) as error:
                reason = str(error) or "it does not answer"
                if reason != told:
                    told = reason
                    log.warning("the shared pool cannot be used: %s", reason)
            await asyncio.sleep(_AGAIN_S)

    def _reaches(self, pool: InstanceId | None) -> None:
        if pool != self.pool:
            self.pool = pool
            self.on_pool()

    async def ask(self, question: Question, expected: type[Expected], timeout_s: float) -> Expected:
        """KvoltError where there is no answer within this time, or another."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.connect()
                answer = await self._ask(question, expected)
        except TimeoutError:
            self._num_silent += 1
            if self._num_silent >= _MOST_SILENT:
                self.give_up("it does not answer")
            raise NetworkFault(f"the pool did not answer within {timeout_s:g} s") from None
        self._num_silent = 0
        return answer

    async def _ask(self, question: Question, expected: type[Expected]) -> Expected:
        writer = self._writer
        if writer is None:
            raise NetworkFault("the connection to the pool is lost")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(frame(Asked(number, question)))
            await writer.drain()
            body = await answer
        except OSError as error:
            raise NetworkFault(f"the connection to the pool is lost: {error}") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(body, Refused):
            raise from_info(body.error)
        if not isinstance(body, expected):
            raise TransferFailed("the pool answered something else", path="pool", reason="answer")
        return body

    def give_up(self, reason: str) -> None:
        """As if it had gone: it is looked for again after a while."""
        if self._writer is not None:
            log.warning("the shared pool is left alone for %g s: %s", _AGAIN_S, reason)
            self._hang_up(self._writer)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                answered = msgspec.msgpack.decode(await read_frame(reader), type=Answered)
                waiting = self._waiting.get(answered.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answered.body)
                else:
                    self.on_late(answered.body)
        except (KvoltError, *MALFORMED) as error:
            log.warning("the shared pool has gone: %s", str(error))
        finally:
            self._hang_up(writer)

    def _hang_up(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        if self._writer is not writer:
            return
        self._writer = None
        self._not_before = self._now() + _AGAIN_S
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NetworkFault("the connection to the pool is lost"))
        self._is_lost.set()
        self._reaches(None)
        self.on_lost()

    async def close(self) -> None:
        await self._crew.close()
        if self._writer is not None:
            self._hang_up(self._writer)
