"""Shared pool: blocks stored by one worker are found by others, and a lost worker leaves no partial state."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.kv.tiers.tier_lab import Clock, Device, device, keys, sequence

from kvolt.core.errors import ConfigError, NetworkFault
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.shared_pool import tier as pool_tier
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.shared_pool.wire import (
    FetchBlocks,
    FetchResult,
    Hello,
    Lookup,
    LookupResult,
    PoolStatus,
    Status,
)
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape


@asynccontextmanager
async def pool(
    path: Path, num_blocks: int = 64, new: Callable[[BlockShape], HostTier] | None = None
) -> AsyncIterator[PoolServer]:
    server = PoolServer(path, new or (lambda shape: HostTier(shape, num_blocks)))
    await server.start()
    try:
        yield server
        if server.host is not None:
            server.host.check_integrity()
    finally:
        await server.close()


@asynccontextmanager
async def worker(
    memory: Device, path: Path, num_host: int = 16, clock: Clock | None = None
) -> AsyncIterator[TieredCache]:
    tier = PoolTier(path, BlockShape.of(memory.slabs), clock or Clock())
    cache = TieredCache.for_slabs(memory.slabs, num_host, [(tier, 1)])
    await cache.start()
    try:
        yield cache
        cache.host.check_integrity()
    finally:
        await cache.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def num_in(server: PoolServer) -> int:
    return 0 if server.host is None else len(server.host.slot_table)


async def test_what_one_has_stored_another_finds_and_it_is_kept_once(tmp_path: Path) -> None:
    blocks = sequence("a", 12)
    path = tmp_path / "pool.sock"
    with device(num_ranks=2) as memory:
        memory.compute(blocks, range(12))
        async with pool(path) as server, worker(memory, path) as one, worker(memory, path) as two:
            await asyncio.gather(one.offload(blocks, range(12)), two.offload(blocks, range(12)))
            await until(lambda: num_in(server) == 12)
            writers = [each.host.stats[Tier.PEER] for each in (one, two)]
            await until(lambda: sum(each.num_stored for each in writers) >= 12)
            assert sum(each.num_stored for each in writers) == 12, "each went there once"
            memory.wipe()
            async with worker(memory, path) as third:
                await third.host.lookup(keys(blocks))
                assert third.host.find_tiers(keys(blocks)) == [Tier.PEER] * 12
                fetched = await third.onboard(blocks, range(30, 42))
                assert fetched.by_tier == ((Tier.PEER, 12),)
                assert all(memory.holds(block, 30 + index) for index, block in enumerate(blocks))


async def test_the_pool_brings_what_went_to_its_disk(tmp_path: Path) -> None:
    blocks = sequence("a", 10)
    path = tmp_path / "pool.sock"

    def new(shape: BlockShape) -> HostTier:
        return HostTier(shape, 12, [(DiskTier(DiskFiles(tmp_path / "disk", shape, 64)), 1)])

    with device() as memory:
        memory.compute(blocks, range(10))
        async with pool(path, new=new) as server:
            async with worker(memory, path) as cache:
                await cache.offload(blocks, range(10))
                await until(lambda: server.host is not None and len(server.host.lower[0]) == 10)
            host = server.host
            assert host is not None
            host.slot_table.forget(host.slot_table)
            memory.wipe()
            async with worker(memory, path) as cache:
                await cache.host.lookup(keys(blocks))
                assert (await cache.onboard(blocks, range(20, 30))).num_blocks == 10
                assert all(memory.holds(block, 20 + index) for index, block in enumerate(blocks))


async def test_a_pool_that_has_gone_is_a_tier_without_blocks_until_it_is_back(tmp_path: Path) -> None:
    blocks = sequence("a", 6)
    path = tmp_path / "pool.sock"
    clock = Clock()
    with device() as memory:
        memory.compute(blocks, range(6))
        async with worker(memory, path, clock=clock) as cache:
            await cache.host.lookup(keys(blocks))
            assert cache.host.find_tiers(keys(blocks)) == [], "the pool is not running yet, which is no error"
            clock.now_s += 10.0
            async with pool(path) as server:
                await cache.offload(blocks, range(6))
                await until(lambda: num_in(server) == 6)
                await until(lambda: cache.host.lower[0].has(blocks[5].key))
                cache.host.slot_table.forget(cache.host.slot_table)
                assert cache.host.find_tiers(keys(blocks)) == [Tier.PEER] * 6
            await until(lambda: not len(cache.host.lower[0]))
            assert (await cache.onboard(blocks, range(6))).num_blocks == 0
            clock.now_s += 10.0
            async with pool(path) as server:
                await cache.offload(blocks, range(6))
                await until(lambda: num_in(server) == 6)


async def test_blocks_of_another_shape_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    async with pool(path):
        with device() as memory, device(block_bytes=7000) as other:
            async with worker(memory, path):
                with pytest.raises(ConfigError) as told:
                    async with worker(other, path):
                        pass
                assert "5,000" in told.value.message
                assert "7,000" in told.value.message


async def test_what_is_held_for_a_worker_that_goes_is_let_go(tmp_path: Path) -> None:
    blocks = sequence("a", 8)
    path = tmp_path / "pool.sock"
    with device() as memory:
        memory.compute(blocks, range(8))
        async with pool(path, num_blocks=8) as server:
            async with worker(memory, path) as cache:
                await cache.offload(blocks, range(8))
                await until(lambda: num_in(server) == 8)
            link = PoolLink(path, BlockShape.of(memory.slabs), Clock())
            result = await link.request(FetchBlocks(tuple(blocks)), FetchResult, 30.0)
            assert len(result.checksums) == 8
            host = server.host
            assert host is not None
            assert host.slot_table.forget(keys(blocks)) == 0, "they are held"
            await link.close()
            await until(lambda: host.slot_table.forget(keys(blocks)) == 8)


async def test_a_full_pool_lets_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with device() as memory:
        async with pool(path, num_blocks=8) as server, worker(memory, path) as cache:
            for name in ("a", "b", "c"):
                blocks = sequence(name, 6)
                memory.compute(blocks, range(6))
                await cache.offload(blocks, range(6))
                await until(lambda blocks=blocks: cache.host.lower[0].has(blocks[5].key))  # type: ignore[misc]
            assert num_in(server) == 8
            old = sequence("a", 6)
            memory.wipe()
            cache.host.slot_table.forget(cache.host.slot_table)
            fetched = await cache.onboard(old, range(20, 26))
            assert all(
                memory.holds(block, 20 + index) for index, block in enumerate(old[: fetched.num_blocks])
            )
            assert fetched.num_blocks < 6


async def test_one_socket_has_one_pool_and_a_dead_ones_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    async with pool(path):
        with pytest.raises(ConfigError, match="another pool"):
            async with pool(path):
                pass
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # what a pool that was killed leaves
    async with pool(path):
        link = PoolLink(path, None, Clock())
        status = await link.request(Status(), PoolStatus, 30.0)
        assert (status.shape, status.num_workers) == (None, 0)
        await link.close()
    other = tmp_path / "notes.txt"
    other.write_text("other data")
    with pytest.raises(ConfigError, match="cannot create the socket"):
        async with pool(other):
            pass
    assert other.read_text() == "other data"


async def test_nonsense_ends_the_connection_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"
    with device() as memory:
        shape = BlockShape.of(memory.slabs)
        async with pool(path):
            for nonsense in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x02\x00\x00\x00\x92\x01"):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(nonsense)
                assert await reader.read() == b""
                writer.close()
            link = PoolLink(path, None, Clock())
            with pytest.raises(ConfigError, match="version"):
                await link.request(Hello(shape, version=99), PoolStatus, 30.0)
            await link.close()
            async with worker(memory, path):
                pass


async def test_frames_that_never_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pool.sock"
    with device() as memory:
        async with pool(path):
            begun = []
            for _ in range(6):  # 16 MiB each, of 64 that there may be
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write((16 << 20).to_bytes(4, "little") + b"x")
                begun.append((reader, writer))
            async with asyncio.timeout(20):
                done, _ = await asyncio.wait(
                    [asyncio.ensure_future(reader.read()) for reader, _ in begun],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            assert done
            async with worker(memory, path):
                pass
            for _, writer in begun:
                writer.close()


async def test_a_missing_pool_is_reported_with_the_remedy(tmp_path: Path) -> None:
    link = PoolLink(tmp_path / "none.sock", None, Clock())
    with pytest.raises(NetworkFault) as told:
        await link.request(Status(), PoolStatus, 1.0)
    assert "kvolt cache serve" in str(told.value.fields["remedy"])
    await link.close()


async def test_the_pool_begins_though_who_came_first_has_gone(tmp_path: Path) -> None:
    """A disk takes long to be read: the first worker gives up, and the second finds all that is there."""
    path, gate = tmp_path / "pool.sock", asyncio.Event()
    blocks = sequence("a", 5)
    num_made = 0

    class Slow(DiskTier):
        async def start(self) -> None:
            await gate.wait()
            await super().start()

    def new(shape: BlockShape) -> HostTier:
        nonlocal num_made
        num_made += 1
        return HostTier(shape, 16, [(Slow(DiskFiles(tmp_path / "disk", shape, 64)), 1)])

    with device() as memory:
        shape = BlockShape.of(memory.slabs)
        memory.compute(blocks, range(5))
        async with pool(path, new=new):
            link = PoolLink(path, shape, Clock())
            with pytest.raises(NetworkFault):
                await link.request(Lookup(tuple(keys(blocks))), LookupResult, 0.05)
            await link.close()
            gate.set()
            async with worker(memory, path) as cache:
                await cache.offload(blocks, range(5))
                await until(lambda: len(list((tmp_path / "disk").rglob("blocks-*"))) == 1)
            assert num_made == 1


async def test_a_pool_that_cannot_begin_says_so_to_each(tmp_path: Path) -> None:
    path = tmp_path / "pool.sock"

    def new(shape: BlockShape) -> HostTier:
        raise ConfigError("there is no memory", key="host", remedy="give it less")

    with device() as memory:
        async with pool(path, new=new):
            for _ in range(2):
                with pytest.raises(ConfigError, match="no memory"):
                    async with worker(memory, path):
                        pass


async def test_a_pool_that_is_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_tier, "_LOOKUP_S", 0.05)
    path = tmp_path / "pool.sock"
    blocks = sequence("a", 4)
    with device() as memory:
        memory.compute(blocks, range(4))
        async with pool(path) as server, worker(memory, path) as cache:
            await cache.offload(blocks, range(4))
            await until(lambda: num_in(server) == 4)
            await until(lambda: len(cache.host.lower[0]) == 4)

            async def silent(*_: object) -> object:
                await asyncio.sleep(3600)
                raise AssertionError

            with monkeypatch.context() as hung:
                hung.setattr(server, "handle", silent)
                for _ in range(3):
                    await cache.host.lower[0].lookup(keys(sequence("b", 4)))
                assert not len(cache.host.lower[0]), "nothing is expected of it any more"


async def test_blocks_fetched_for_a_gone_worker_are_released_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool.sock"
    blocks = sequence("a", 8)
    with device() as memory:
        memory.compute(blocks, range(8))
        async with pool(path) as server, worker(memory, path, num_host=8) as cache:
            await cache.offload(blocks, range(8))
            await until(lambda: num_in(server) == 8)
            await until(lambda: len(cache.host.lower[0]) == 8)
            cache.host.slot_table.forget(cache.host.slot_table)
            host = server.host
            assert host is not None
            onboard, gate = host.onboard, asyncio.Event()

            async def slow(blocks: object) -> object:
                await gate.wait()
                return await onboard(blocks)  # type: ignore[arg-type]

            monkeypatch.setattr(host, "onboard", slow)
            fetching = asyncio.ensure_future(cache.onboard(blocks, range(8)))
            await asyncio.sleep(0.05)
            fetching.cancel()
            await asyncio.wait([fetching])
            gate.set()
            await until(lambda: host.slot_table.forget(keys(blocks)) == 8)
