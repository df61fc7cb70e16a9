"""PoolServer: one host tier with its lower tiers for all workers of a host, so that a prefix is stored once.

The pool reads offered blocks from workers' memory and workers read from the pool's memory, through transfer agents. No
process writes to another's memory (ADR 10), so a worker that dies leaves no partial block. All blocks have the shape of
the first worker; workers with another shape are rejected.
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
    MALFORMED,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    TransferFailed,
    to_info,
)
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.kv.shared_pool import wire
from kvolt.kv.shared_pool.slot_reads import offer_slots, read_slots, withdraw_offers
from kvolt.kv.tiers.host_tier import HostTier, int64_array
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.tasks import TaskGroup
from kvolt.transfer.agent import OfferHandle, TransferAgent
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers
from kvolt.transfer.peer.handshakes import TlsContexts

log = logging.getLogger(__name__)

_TRANSFER_S = 30.0
_CLOSE_S = 1.0
"""Time limit for sending the last responses."""
_MAX_CONNECTIONS = 1024
_UNFINISHED_BYTES = 64 << 20
"""Limit on incomplete frames of all workers."""
_MAX_OPEN = 64
"""Concurrent requests of one worker."""

NewHost = Callable[[BlockShape], HostTier]


class PoolServer:
    """See the module. `start`, then `close`."""

    def __init__(self, path: Path, new_host: NewHost, credentials: TlsContexts | None = None) -> None:
        """`new_host`: creates the tiers once the block shape is known. ConfigError if not possible. `credentials`: for
        transfers over TCP, used where shared memory is unavailable."""
        self._path = path
        self._new_host = new_host
        self.host: HostTier | None = None
        self.name: InstanceId | None = None
        """Instance id under which blocks are published to routers; None: not published."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after possible changes of blocks. Set before `start`."""
        self._starting: asyncio.Future[HostTier] | None = None
        self._agent = TransferAgent(credentials=credentials)
        self._thread = TierThread("kv-pool")
        self._server: asyncio.Server | None = None
        self._task_group = TaskGroup("kv pool")
        self._num_workers = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._unfinished = ByteBudget(_UNFINISHED_BYTES, _UNFINISHED_BYTES)

    async def start(self) -> None:
        """ConfigError if another pool uses the socket or it cannot be created."""
        if await _is_served(self._path):
            raise ConfigError(
                f"another pool uses {self._path}", key="socket", remedy="stop it, or choose another --socket"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._path.is_socket():  # left by a killed pool
                self._path.unlink()
            before = os.umask(0o177)
            try:
                self._server = await asyncio.start_unix_server(self._on_connection, self._path)
            finally:
                os.umask(before)
        except OSError as error:
            raise ConfigError(
                f"cannot create the socket {self._path}: {error.strerror or error}",
                key="socket",
                remedy="set --socket to a short path in a writable folder",
            ) from None

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        await self._task_group.close()
        for writer in self._writers:
            await _close_writer(writer)
        await asyncio.to_thread(self._agent.close)
        await self._thread.close()
        if self.host is not None:
            await self.host.close()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= _MAX_CONNECTIONS:
            log.warning("connection refused: limit=%d", _MAX_CONNECTIONS)
            writer.close()
            return
        self._writers.add(writer)
        if not self._task_group.closed:
            self._task_group.start(self._serve(reader, writer), "worker")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, writer)
        self._num_workers += 1
        try:
            while True:
                data = await wire.read_frame(
                    reader, lambda num_bytes: self._unfinished.set_held_bytes(client, num_bytes)
                )
                self._unfinished.set_held_bytes(client, 0)
                await client.on_request(msgspec.msgpack.decode(data, type=wire.RequestFrame))
        except (KvoltError, *MALFORMED) as error:
            log.debug("connection closed: error=%s", error)
        finally:
            self._num_workers -= 1
            self._unfinished.set_held_bytes(client, 0)
            await client.close()
            self._writers.discard(writer)
            await _close_writer(writer)

    # --- requests; `offers` are withdrawn when the worker's connection closes

    async def handle(self, request: wire.PoolRequest, offers: set[OfferHandle]) -> wire.PoolResponse:
        if isinstance(request, wire.Status):
            return self._status()
        if isinstance(request, wire.Hello):
            await self._on_hello(request)
            return wire.HelloResult(self.name)
        host = self.host
        if host is None:
            raise InvalidRequest("Hello must be the first request")
        if isinstance(request, wire.Lookup):
            keys = [BlockKey(key) for key in request.keys]
            await host.lookup(keys, request.worth_s)
            return wire.LookupResult(tuple(bool(host.find_tiers([key])) for key in keys))
        if isinstance(request, wire.StoreBlocks):
            return wire.StoreResult(await self._store(host, request))
        if isinstance(request, wire.VerifyBlocks):
            await self._verify(host, [BlockKey(key) for key in request.keys])
            return wire.Done()
        return await self._fetch(host, request, offers)

    def _status(self) -> wire.PoolStatus:
        host = self.host
        if host is None:
            return wire.PoolStatus(None, self._num_workers - 1, ())
        sizes = tuple(
            wire.TierSize(tier.value, *host.size(tier), host.shape_in(tier).block_bytes)
            for tier in host.stats
        )
        return wire.PoolStatus(host.shape, self._num_workers - 1, sizes)

    async def _on_hello(self, hello: wire.Hello) -> None:
        if hello.version != wire.VERSION:
            raise ConfigError(
                f"the pool has protocol version {wire.VERSION}, the worker {hello.version}",
                key="tiers.pool",
                remedy="run one version of kvolt on this host",
            )
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_future()
            # A task of the pool, since the first worker may disconnect while the disk tier is recovered.
            self._task_group.start(self._start_host(hello.shape, self._starting), "start host")
        host = await asyncio.shield(self._starting)
        if host.shape != hello.shape:
            local, remote = host.shape, hello.shape
            raise ConfigError(
                f"block shapes differ: the pool at {self._path} has {local.block_bytes:,} bytes from {local.num_ranks} "
                f"ranks in {local.dtype or 'bytes'}, the worker {remote.block_bytes:,} from {remote.num_ranks} in "
                f"{remote.dtype or 'bytes'}",
                key="tiers.pool",
                remedy="run one pool per model: `kvolt cache serve --socket PATH`",
            )

    async def _start_host(self, shape: BlockShape, started: asyncio.Future[HostTier]) -> None:
        host: HostTier | None = None
        try:
            host = self._new_host(shape)
            await host.start()
        except BaseException as error:
            self._starting = None  # the next worker retries
            if host is not None:
                await host.close()
            failure = (
                error if isinstance(error, KvoltError) else EngineFailed(f"the pool cannot start: {error!r}")
            )
            started.set_exception(failure)
            started.exception()  # mark as retrieved
            if not isinstance(error, Exception):
                raise
            return
        self.host = host
        host.set_on_change(self.on_change)
        started.set_result(host)

    async def _store(self, host: HostTier, request: wire.StoreBlocks) -> int:
        blocks = request.blocks
        if len(blocks) > wire.MAX_BLOCKS or len(blocks) != len(request.checksums):
            raise InvalidRequest(
                f"{len(blocks)} blocks with {len(request.checksums)} checksums, limit is {wire.MAX_BLOCKS}"
            )

        async def fill(slots: Numbers, indexes: list[int]) -> tuple[Sums, float]:
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            await self._thread.run(host.memory.grow_to, int(slots.max()) + 1)
            slot_by_index = dict(zip(indexes, slots.tolist(), strict=True))
            await read_slots(self._agent, request.offered, host.memory, slot_by_index, _TRANSFER_S)
            keys = [blocks[index].key for index in indexes]
            sums, _ = await self._thread.run(host.memory.checksums, slots, keys)
            if sums.tolist() != [request.checksums[index] for index in indexes]:
                raise TransferFailed("checksum mismatch of received blocks", path="pool", reason="checksum")
            return sums, loop.time() - started_at

        num_new = await host.store(blocks, fill)
        if not num_new:
            for each in request.offered:
                self._agent.decline(each.ticket)
        return num_new

    async def _fetch(
        self, host: HostTier, request: wire.FetchBlocks, offers: set[OfferHandle]
    ) -> wire.FetchResult:
        blocks = request.blocks[: wire.MAX_BLOCKS]
        onboarded = await host.onboard(blocks)
        keys = list(onboarded.keys)
        if not keys:
            return wire.FetchResult((), ())
        try:
            slots = int64_array(map(host.slot_table.slot, keys))
            sums = tuple(map(host.slot_table.checksum, keys))
            new_offers, offered = offer_slots(self._agent, host.memory, slots, _TRANSFER_S)
        except BaseException:
            host.release(keys)
            raise
        offers.update(new_offers)
        self._task_group.start(self._release_after(host, new_offers, keys, offers), "hold for a worker")
        return wire.FetchResult(sums, offered)

    async def _release_after(
        self, host: HostTier, new_offers: list[OfferHandle], keys: list[BlockKey], offers: set[OfferHandle]
    ) -> None:
        try:
            for offer in new_offers:
                await offer.wait_done()
        except asyncio.CancelledError:
            await withdraw_offers(new_offers)
            raise
        finally:
            offers.difference_update(new_offers)
            host.release(keys)

    async def _verify(self, host: HostTier, keys: Sequence[BlockKey]) -> None:
        """Verify blocks that a worker found corrupt, since the fault may be on its side; remove only corrupt ones."""
        held = [key for key in keys[: wire.MAX_BLOCKS] if host.slot_table.has(key)]
        slots = int64_array(host.slot_table.hold(held, is_access=False))
        try:
            sums, _ = await self._thread.run(host.memory.checksums, slots, held)
        finally:
            host.release(held)
        for key, checksum in zip(held, sums.tolist(), strict=True):
            if host.slot_table.has(key) and checksum != host.slot_table.checksum(key):
                host.mark_corrupt(key)


class _Client:
    """One worker's connection."""

    def __init__(self, server: PoolServer, writer: asyncio.StreamWriter) -> None:
        self.peer_host = "unix"
        self._server = server
        self._writer = writer
        self._task_group = TaskGroup("kv pool client")
        self._open = asyncio.Semaphore(_MAX_OPEN)
        self._offers: set[OfferHandle] = set()

    def shed(self) -> None:
        """ByteBudget: this connection holds the most incomplete data."""
        self._writer.transport.abort()

    async def on_request(self, request: wire.RequestFrame) -> None:
        await self._open.acquire()  # further requests wait in the socket
        self._task_group.start(self._respond(request), "request")

    async def _respond(self, request: wire.RequestFrame) -> None:
        try:
            body = await self._server.handle(request.body, self._offers)
        except Exception as error:  # fails this request only
            if not isinstance(error, KvoltError):
                log.exception("unexpected error while handling a request")
                error = EngineFailed(f"the pool failed ({type(error).__name__})")
            body = wire.ErrorResponse(to_info(error))
        self._server.on_change()
        try:
            self._writer.write(wire.frame(wire.ResponseFrame(request.number, body)))
            await self._writer.drain()  # back-pressure: a client that does not read gets no further responses
        except OSError:
            log.debug("response not sent: connection closed")
        finally:
            self._open.release()

    async def close(self) -> None:
        await self._task_group.close()
        for offer in list(self._offers):
            offer.cancel()


async def _is_served(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    await _close_writer(writer)
    return True


async def _close_writer(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()
        return
    writer.transport.abort()
