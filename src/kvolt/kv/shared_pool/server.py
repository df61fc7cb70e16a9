"""PoolServer: one host tier, with what is below it, for all workers of a host. A prefix is kept once.

The pool reads from workers' memory what they offer, and they read from its memory what they want, by their transfer
agents: nobody writes to another's memory (ADR 10), so that a worker that dies at any moment leaves nothing half
written. All blocks are of one shape, that of the first worker that comes; others are refused with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvolt.core.errors import (
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    TransferFailed,
    to_info,
)
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.kv.shared_pool.slot_reads import offer_slots, read_slots, withdraw
from kvolt.kv.shared_pool.wire import (
    MOST_BLOCKS,
    VERSION,
    Answer,
    Answered,
    Asked,
    Bring,
    Brought,
    Done,
    Found,
    Hello,
    Keep,
    Kept,
    Look,
    Met,
    PoolStatus,
    Question,
    Refused,
    Status,
    Suspect,
    TierSize,
    frame,
    read_frame,
)
from kvolt.kv.tiers.host_tier import HostTier, numbers_of
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.tasks import Crew
from kvolt.transfer.agent import Offering, TransferAgent
from kvolt.transfer.memory.device_memory import Sums
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_TRANSFER_S = 30.0
_CLOSE_S = 1.0
"""For the last answers to be taken."""
_MOST_WORKERS = 1024
"""Connections."""
_UNFINISHED_BYTES = 64 << 20
"""Of frames that have not come whole, of all workers."""
_MOST_OPEN = 64
"""Questions of one worker that are worked on."""

NewHost = Callable[[BlockShape], HostTier]


class PoolServer:
    """See the module. `start`, then `close`."""

    def __init__(self, path: Path, new_host: NewHost) -> None:
        """`new_host`: the tiers, once it is known what blocks they are for. ConfigError where they cannot be."""
        self._path = path
        self._new_host = new_host
        self.host: HostTier | None = None
        self.name: InstanceId | None = None
        """Under which routers are told what it has; None where they are not."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when blocks may have come or gone. To be set before `start`."""
        self._beginning: asyncio.Future[HostTier] | None = None
        self._agent = TransferAgent()
        self._thread = TierThread("kv-pool")
        self._server: asyncio.Server | None = None
        self._crew = Crew("kv pool")
        self._num_workers = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._unfinished = ByteBudget(_UNFINISHED_BYTES, _UNFINISHED_BYTES)

    async def start(self) -> None:
        """ConfigError where another pool has the socket, or there can be none."""
        if await _answers(self._path):
            raise ConfigError(
                f"another pool has {self._path}", key="socket", remedy="stop it, or name another --socket"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._path.is_socket():  # of a pool that was killed
                self._path.unlink()
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._come, self._path)
            finally:
                os.umask(before)
        except OSError as error:
            raise ConfigError(
                f"no socket can be made at {self._path}: {error.strerror or error}",
                key="socket",
                remedy="name one by --socket whose folder can be written and whose path is short",
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        await self._crew.close()
        for writer in self._writers:
            await _hang_up(writer)
        await asyncio.to_thread(self._agent.close)
        await self._thread.close()
        if self.host is not None:
            await self.host.close()

    def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= _MOST_WORKERS:
            log.warning("connection refused: the pool has %d workers, the most it may have", _MOST_WORKERS)
            writer.close()
            return
        self._writers.add(writer)
        if not self._crew.closed:
            self._crew.start(self._serve(reader, writer), "worker")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, writer)
        self._num_workers += 1
        try:
            while True:
                data = await read_frame(reader, lambda num_bytes: self._unfinished.hold(client, num_bytes))
                self._unfinished.hold(client, 0)
                await client.asked(msgspec.msgpack.decode(data, type=Asked))
        except (KvoltError, *MALFORMED) as error:
            log.debug("a connection has ended: %s", str(error))
        finally:
            self._num_workers -= 1
            self._unfinished.hold(client, 0)
            await client.close()
            self._writers.discard(writer)
            await _hang_up(writer)

    # --- what may be asked; `mine` are the offers that end with the worker's connection

    async def answer(self, question: Question, mine: set[Offering]) -> Answer:
        if isinstance(question, Status):
            return self._status()
        if isinstance(question, Hello):
            await self._meet(question)
            return Met(self.name)
        host = self.host
        if host is None:
            raise InvalidRequest("say hello first")
        if isinstance(question, Look):
            keys = [BlockKey(key) for key in question.keys]
            await host.look(keys, question.worth_s)
            return Found(tuple(bool(host.tiers_of([key])) for key in keys))
        if isinstance(question, Keep):
            return Kept(await self._keep(host, question))
        if isinstance(question, Suspect):
            await self._suspect(host, [BlockKey(key) for key in question.keys])
            return Done()
        return await self._bring(host, question, mine)

    def _status(self) -> PoolStatus:
        host = self.host
        if host is None:
            return PoolStatus(None, self._num_workers - 1, ())
        sizes = tuple(
            TierSize(tier.value, *host.size(tier), host.shape_in(tier).block_bytes) for tier in host.stats
        )
        return PoolStatus(host.shape, self._num_workers - 1, sizes)

    async def _meet(self, hello: Hello) -> None:
        if hello.version != VERSION:
            raise ConfigError(
                f"the pool speaks version {VERSION}, the worker {hello.version}",
                key="tiers.pool",
                remedy="run one version of kvolt on this host",
            )
        if self._beginning is None:
            self._beginning = asyncio.get_running_loop().create_future()
            # Of the pool, not of who came first: he may go while a disk is read.
            self._crew.start(self._begin(hello.shape, self._beginning), "begin")
        host = await asyncio.shield(self._beginning)
        if host.shape != hello.shape:
            ours = host.shape
            raise ConfigError(
                f"the pool at {self._path} has blocks of {ours.block_bytes:,} bytes of {ours.num_ranks} ranks in "
                f"{ours.dtype or 'bytes'}, the worker {hello.shape.block_bytes:,} of {hello.shape.num_ranks} in "
                f"{hello.shape.dtype or 'bytes'}",
                key="tiers.pool",
                remedy="a pool for each model: `kvolt cache serve --socket` another",
            )

    async def _begin(self, shape: BlockShape, begun: asyncio.Future[HostTier]) -> None:
        host: HostTier | None = None
        try:
            host = self._new_host(shape)
            await host.start()
        except BaseException as error:
            self._beginning = None  # the next may have more luck
            if host is not None:
                await host.close()
            failure = (
                error if isinstance(error, KvoltError) else EngineFailed(f"the pool cannot begin: {error!r}")
            )
            begun.set_exception(failure)
            begun.exception()  # heard, also where nobody waits any more
            if not isinstance(error, Exception):
                raise
            return
        self.host = host
        host.on_change(self.on_change)
        begun.set_result(host)

    async def _keep(self, host: HostTier, keep: Keep) -> int:
        blocks = [each.block() for each in keep.blocks]
        if len(blocks) > MOST_BLOCKS or len(blocks) != len(keep.checksums):
            raise InvalidRequest(f"{len(blocks)} blocks with {len(keep.checksums)} checksums")

        async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            await self._thread.run(host.memory.reach, int(slots.max()) + 1)
            wanted = dict(zip(places, slots.tolist(), strict=True))
            await read_slots(self._agent, keep.offered, host.memory, wanted, _TRANSFER_S)
            keys = [blocks[place].key for place in places]
            sums, _ = await self._thread.run(host.memory.checksums, slots, keys)
            if sums.tolist() != [keep.checksums[place] for place in places]:
                raise TransferFailed("blocks came with other checksums", path="pool", reason="checksum")
            return sums, loop.time() - began_at

        num_new = await host.store(blocks, fill)
        if not num_new:
            for each in keep.offered:
                self._agent.decline(each.ticket)
        return num_new

    async def _bring(self, host: HostTier, question: Bring, mine: set[Offering]) -> Brought:
        blocks = [each.block() for each in question.blocks[:MOST_BLOCKS]]
        brought = await host.bring(blocks)
        keys = list(brought.keys)
        if not keys:
            return Brought((), ())
        try:
            slots = numbers_of(map(host.books.slot, keys))
            sums = tuple(map(host.books.checksum, keys))
            offerings, told = offer_slots(self._agent, host.memory, slots, _TRANSFER_S)
        except BaseException:
            host.release(keys)
            raise
        mine.update(offerings)
        self._crew.start(self._release_after(host, offerings, keys, mine), "held for a worker")
        return Brought(sums, told)

    async def _release_after(
        self, host: HostTier, offerings: list[Offering], keys: list[BlockKey], mine: set[Offering]
    ) -> None:
        try:
            for offering in offerings:
                await offering.over()
        except asyncio.CancelledError:
            await withdraw(offerings)
            raise
        finally:
            mine.difference_update(offerings)
            host.release(keys)

    async def _suspect(self, host: HostTier, keys: Sequence[BlockKey]) -> None:
        """A worker may be wrong, and its bus: only what is not what it was is forgotten."""
        held = [key for key in keys[:MOST_BLOCKS] if host.books.has(key)]
        slots = numbers_of(host.books.hold(held, is_asked=False))
        try:
            sums, _ = await self._thread.run(host.memory.checksums, slots, held)
        finally:
            host.release(held)
        for key, found in zip(held, sums.tolist(), strict=True):
            if host.books.has(key) and found != host.books.checksum(key):
                host.spoiled(key)


class _Client:
    """One worker's connection."""

    def __init__(self, server: PoolServer, writer: asyncio.StreamWriter) -> None:
        self.peer_host = "unix"
        self._server = server
        self._writer = writer
        self._crew = Crew("kv pool's worker")
        self._open = asyncio.Semaphore(_MOST_OPEN)
        self._offerings: set[Offering] = set()

    def shed(self) -> None:
        """Frames that have not come whole are over their budget, and this one is the largest."""
        self._writer.transport.abort()

    async def asked(self, asked: Asked) -> None:
        await self._open.acquire()  # who asks for more than that waits in its socket
        self._crew.start(self._answer(asked), "question")

    async def _answer(self, asked: Asked) -> None:
        try:
            body = await self._server.answer(asked.body, self._offerings)
        except Exception as error:  # one question's: the worker is told
            if not isinstance(error, KvoltError):
                log.exception("a question of a worker failed")
                error = EngineFailed(f"the pool failed ({type(error).__name__})")
            body = Refused(to_info(error))
        self._server.on_change()
        try:
            self._writer.write(frame(Answered(asked.number, body)))
            await self._writer.drain()  # one that does not listen is not answered any more than it may ask
        except OSError:
            log.debug("an answer found nobody")
        finally:
            self._open.release()

    async def close(self) -> None:
        await self._crew.close()
        for offering in list(self._offerings):
            offering.cancel()


async def _answers(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    await _hang_up(writer)
    return True


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()
        return
    writer.transport.abort()
