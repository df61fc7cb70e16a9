"""A pool tells what workers brought to it and what its disk has kept; a worker says which pool it reaches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.kv.tiers.tier_lab import Device, device, sequence

from kvolt.cli.process import running
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvEventBatch, Tier, unpack_hashes
from kvolt.core.kv_recovery import KvContents, KvSnapshotPart
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.shared_pool import link as pool_link
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.shared_pool.wire import Hello
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.tasks import TaskGroup
from kvolt.worker.kv.pool_event_publisher import PoolEventPublisher, watch_pool

_decode = msgspec.msgpack.Decoder(KvEventBatch).decode
NOW = SystemClock().monotonic


class Told:
    """A pool's process: its server, and what it has told."""

    def __init__(self, server: PoolServer, publisher: PoolEventPublisher, name: InstanceId | None) -> None:
        self.server, self.publisher, self.name = server, publisher, name

    def blocks(self, tier: Tier) -> set[int]:
        """As a router is answered that asks for all."""
        assert self.publisher.journal is not None
        parts = [
            each
            for each in self.publisher.journal.recover(KvContents())
            if isinstance(each, KvSnapshotPart) and each.tier is tier
        ]
        return {name for part in parts for name in unpack_hashes(part.hashes)}


@asynccontextmanager
async def pool(
    folder: Path, num_host: int = 64, tells: bool = True, has_disk: bool = True
) -> AsyncIterator[Told]:
    def new(shape: BlockShape) -> HostTier:
        disk = [(DiskTier(DiskFiles(folder / "disk", shape, 64)), 1)] if has_disk else []
        return HostTier(shape, num_host, disk)

    settings = msgspec.structs.replace(
        Settings(),
        discovery=msgspec.structs.replace(Settings().discovery, kind="mem"),
        events=msgspec.structs.replace(Settings().events, kind="mem"),
        admin=msgspec.structs.replace(Settings().admin, enabled=False),
    )
    server = PoolServer(folder / "pool.sock", new)
    async with running(settings, "pool", ProcessRole.POOL) as process:
        publisher = PoolEventPublisher(process.runtime, "test")
        told = Told(server, publisher, await publisher.start() if tells else None)
        if told.name is not None:
            publisher.attach(server, told.name)
        try:
            await server.start()
            yield told
        finally:
            await server.close()


@asynccontextmanager
async def worker(memory: Device, folder: Path) -> AsyncIterator[TieredCache]:
    tier = PoolTier(folder / "pool.sock", BlockShape.of(memory.slabs), NOW)
    cache = TieredCache.for_slabs(memory.slabs, 16, [(tier, 1)])
    await cache.start()
    try:
        yield cache
    finally:
        await cache.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def emptied(host: HostTier) -> None:
    """Remove every block. A writer to a tier below holds its batch until that tier has answered, which may be after
    the blocks can be found there."""

    def remove_blocks() -> bool:
        host.slot_table.forget(host.slot_table)
        return len(host.slot_table) == 0

    await until(remove_blocks)


def hashes(blocks: Sequence[TierBlock]) -> set[int]:
    return {block.sequence_hash for block in blocks}


async def test_pool_publishes_blocks_of_workers_once(tmp_path: Path) -> None:
    blocks = sequence("a", 8)
    with device() as memory:
        memory.compute(blocks, range(8))
        async with pool(tmp_path) as told, worker(memory, tmp_path) as one, worker(memory, tmp_path) as two:
            await asyncio.gather(one.offload(blocks, range(8)), two.offload(blocks, range(8)))
            await until(lambda: told.blocks(Tier.HOST) == told.blocks(Tier.DISK) == hashes(blocks))
            assert told.publisher.journal is not None
            assert told.publisher.journal.counts["stored"] == 16, "each block once in each tier"
            status = await told.publisher._runtime.status()
            assert status.details["pool"] == {"host": 8, "disk": 8}
            batches = [_decode(each) for each in told.publisher.journal.batches_since(0) or ()]
            assert {batch.instance for batch in batches} == {told.name}
            for cache in (one, two):
                tiers = {each.tier for each in cache.host.take_changes()}
                assert tiers == {Tier.HOST}, "workers tell of their own memory only"


async def test_pool_publishes_removed_blocks(tmp_path: Path) -> None:
    with device() as memory:
        async with pool(tmp_path, num_host=8, has_disk=False) as told, worker(memory, tmp_path) as cache:
            for name in ("a", "b"):
                blocks = sequence(name, 6)
                memory.compute(blocks, range(6))
                await cache.offload(blocks, range(6))
                await until(lambda blocks=blocks: told.blocks(Tier.HOST) >= hashes(blocks))  # type: ignore[misc]
            host = told.server.host
            assert host is not None
            assert len(told.blocks(Tier.HOST)) == len(host.slot_table) == 8
            assert told.publisher.journal is not None
            assert told.publisher.journal.counts["removed"] == 4


async def test_pool_publishes_blocks_loaded_from_disk(tmp_path: Path) -> None:
    blocks = sequence("a", 6)
    with device() as memory:
        memory.compute(blocks, range(6))
        async with pool(tmp_path) as told, worker(memory, tmp_path) as cache:
            await cache.offload(blocks, range(6))
            await until(lambda: told.blocks(Tier.DISK) == hashes(blocks))
            host = told.server.host
            assert host is not None
            await emptied(host)
            await emptied(cache.host)
            told.server.on_change()
            assert told.blocks(Tier.HOST) == set()
            assert (await cache.onboard(blocks, range(20, 26))).num_blocks == 6
            await until(lambda: told.blocks(Tier.HOST) == hashes(blocks))


async def test_restarted_pool_publishes_its_disk(tmp_path: Path) -> None:
    """As soon as a worker says what blocks they are; it has another name then."""
    blocks = sequence("a", 6)
    with device() as memory:
        memory.compute(blocks, range(6))
        async with pool(tmp_path) as before, worker(memory, tmp_path) as cache:
            await cache.offload(blocks, range(6))
            await until(lambda: before.blocks(Tier.DISK) == hashes(blocks))
        async with pool(tmp_path) as told:
            assert told.name != before.name
            assert told.blocks(Tier.DISK) == set(), "it does not know yet what blocks there are"
            async with worker(memory, tmp_path):
                assert told.blocks(Tier.DISK) == hashes(blocks)
                assert told.blocks(Tier.HOST) == set()


async def test_a_worker_says_which_pool_it_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request that needs it: one that is back is found again."""
    monkeypatch.setattr(pool_link, "_RETRY_S", 0.05)
    said: list[InstanceId | None] = []

    async def register_anew(*, kv_pool: InstanceId | None) -> None:
        said.append(kv_pool)

    task_group = TaskGroup("test")
    with device() as memory:
        async with worker(memory, tmp_path) as cache:
            task_group.start(watch_pool(cache.host, register_anew), "pool")
            await until(lambda: said == [None])
            async with pool(tmp_path) as first:
                await until(lambda: said == [None, first.name])
            await until(lambda: said == [None, first.name, None])
            async with pool(tmp_path) as second:
                await until(lambda: said == [None, first.name, None, second.name])
            await until(lambda: len(said) == 5)
            async with pool(tmp_path, tells=False) as silent:
                await until(lambda: silent.server._num_workers == 1)
            assert said[4:] == [None], "one that tells nobody has no name"
            await task_group.close()


async def test_a_pool_that_is_back_for_others_is_not_reached_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_link, "_RETRY_S", 0.02)
    num_met = 0
    with device() as memory, device(block_bytes=7000) as other:
        async with pool(tmp_path, has_disk=False) as first, worker(memory, tmp_path) as cache:
            tier = cache.host.lower[0]
            assert isinstance(tier, PoolTier)
            assert tier.pool == first.name
            await first.server.close()
            await until(lambda: tier.pool is None)
            elsewhere = tmp_path / "b"
            async with pool(elsewhere, has_disk=False) as second, worker(other, elsewhere):
                meet = second.server._on_hello

                async def counted(hello: Hello) -> None:
                    nonlocal num_met
                    num_met += 1
                    await meet(hello)

                monkeypatch.setattr(second.server, "_on_hello", counted)
                (elsewhere / "pool.sock").rename(tmp_path / "pool.sock")
                await until(lambda: num_met >= 4)
                assert caplog.text.count("shared pool unusable") == 1
                assert tier.pool is None


async def test_a_worker_without_a_pool_says_nothing() -> None:
    with device() as memory:
        cache = TieredCache.for_slabs(memory.slabs, 16)
        await cache.start()
        await watch_pool(cache.host, None)  # type: ignore[arg-type]
        await cache.close()
