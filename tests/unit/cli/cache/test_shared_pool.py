"""`kvolt cache serve`, and the pools that `kvolt serve` starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvolt.cli.cache.pool_command import pools_of, serve_command, short_socket
from kvolt.cli.cache.shared_pool import _serve_and_report, new_host
from kvolt.cli.main import main
from kvolt.cli.process import running
from kvolt.cli.worker.tier_settings import with_tiers
from kvolt.core.errors import ConfigError
from kvolt.core.kv_events import Tier
from kvolt.kv.disk import fp8
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.config.loader import load
from kvolt.runtime.config.settings import Settings, TierSettings, WorkerSettings
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.tasks import Scope

SHARED = TierSettings(host="8MiB", disk="16MiB", shared=True)


def groups(*tiers: TierSettings, model: str = "m") -> Settings:
    workers = [
        WorkerSettings(name=f"g{number}", model=model, tiers=each) for number, each in enumerate(tiers)
    ]
    return msgspec.structs.replace(Settings(), workers=workers)


def test_groups_of_equal_tiers_have_one_pool(tmp_path: Path) -> None:
    other = msgspec.structs.replace(SHARED, host="9MiB")
    plain = TierSettings(host="4MiB")
    config = tmp_path / "workers.toml"
    with pools_of(groups(SHARED, SHARED, other, plain), tmp_path, config) as (settings, specs):
        assert [spec.name for spec in specs] == ["kv-pool-0", "kv-pool-1"]
        assert {spec.stage for spec in specs} == {-1}, "they end after the workers"
        pools = [group.tiers.pool for group in settings.workers]
        assert pools[0] == pools[1] == str(tmp_path / "kv-pool-0.sock")
        assert pools[2] == str(tmp_path / "kv-pool-1.sock")
        assert settings.workers[3].tiers == plain
        assert not settings.workers[0].tiers.host, "what blocks pass through is small"
        command = specs[0].argv
        assert command[command.index("--host") + 1] == "8MiB"
        assert command[command.index("--disk") + 1] == "16MiB"
        assert command[command.index("--config") + 1] == str(config), "it is found where workers are"
        assert command[command.index("--name") + 1] == "kv-pool-0"


def test_nothing_is_shared_unless_it_is_asked_for(tmp_path: Path) -> None:
    given = groups(TierSettings(host="4MiB"))
    with pools_of(given, tmp_path) as (settings, specs):
        assert (settings, specs) == (given, [])


def test_a_socket_has_a_short_path(tmp_path: Path) -> None:
    assert short_socket(tmp_path, "p.sock") == tmp_path / "p.sock"
    long = tmp_path / ("x" * 120)
    path = short_socket(long, "p.sock")
    assert len(str(path)) < 100
    path.parent.rmdir()


def test_the_command_says_what_the_settings_say() -> None:
    tiers = TierSettings(
        host="1GiB", disk_compression="fp8", disk_low_water=0.0, object="s3://b/kv", eviction="s3fifo"
    )
    command = serve_command(Path("/s"), tiers, "pool-7", Path("/w.toml"))
    assert command[3:] == (
        *("cache", "serve", "--name", "pool-7", "--socket", "/s", "--config", "/w.toml"),
        *("--host", "1GiB", "--host-high-water", "0.25"),
        *("--disk-touches", "1", "--disk-compression", "fp8"),
        *("--disk-low-water", "0.0", "--disk-high-water", "0.02"),
        *("--object", "s3://b/kv", "--object-touches", "2"),
        *("--object-compression", "none", "--eviction", "s3fifo"),
    )


async def test_the_tiers_of_a_pool(tmp_path: Path) -> None:
    tiers = TierSettings(
        host="100blocks", disk="300blocks", disk_dir=str(tmp_path), object=str(tmp_path / "o")
    )
    host = new_host(tiers, lambda: 0.0)(BlockShape(4096))
    await host.start()
    assert {tier: host.size(tier)[1] for tier in host.stats} == {
        Tier.HOST: 100,
        Tier.DISK: 300,
        Tier.OBJECT: None,
    }
    await host.close()


async def test_a_pool_knows_what_values_its_workers_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fp8, "IS_NATIVE", False)
    tiers = TierSettings(host="100blocks", disk="10MiB", disk_dir=str(tmp_path), disk_compression="fp8")
    new = new_host(tiers, lambda: 0.0)
    host = new(BlockShape(1 << 20, 1, "bfloat16"))
    await host.start()
    assert host.size(Tier.DISK)[1] == 19, "of a mebibyte each without"
    assert host.shape_in(Tier.DISK).block_bytes == (1 << 19) + (1 << 13)
    await host.close()
    assert "native fp8 conversion unavailable" in caplog.text
    with pytest.raises(ConfigError, match="its dtype is unknown"):
        new(BlockShape(1 << 20))


def flags(**more: object) -> argparse.Namespace:
    names = ("kv_host", "kv_disk", "kv_disk_dir", "kv_disk_direct", "kv_object", "kv_pool", "kv_peers")
    return argparse.Namespace(**{**dict.fromkeys(names), **more})


def test_what_is_shared_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="--kv-shared requires a host tier"):
        with_tiers(WorkerSettings(), flags(kv_shared=True))
    assert with_tiers(WorkerSettings(), flags(kv_shared=True, kv_host="1GiB")).tiers.shared
    assert with_tiers(WorkerSettings(), flags(kv_pool="/s")).tiers.pool == "/s"


def test_a_pool_has_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "serve", "--host", "2x"]) == 2
    assert "cannot be relative to the device" in capsys.readouterr().err


def test_how_much_a_pool_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.sock"
    assert main(["cache", "stat", "--pool", str(path)]) == 1
    assert "kvolt cache serve" in capsys.readouterr().err
    is_ready, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        server = PoolServer(path, new_host(TierSettings(host="100blocks"), lambda: 0.0))
        await server.start()
        is_ready.set()
        await asyncio.to_thread(is_over.wait, 60)
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_ready.wait(60)
        assert main(["cache", "stat", "--pool", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_workers"] == 0
        assert main(["cache", "stat", "--pool", str(path)]) == 0
        assert "no worker has connected yet" in capsys.readouterr().out
    finally:
        is_over.set()
        thread.join()


async def test_a_running_pool_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pools of `kvolt serve --kv-shared` have sockets in its directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVOLT_DISCOVERY_PATH", str(tmp_path / "discovery"))
    monkeypatch.setenv("KVOLT_ADMIN_ENABLED", "false")
    given = load(cwd=tmp_path).settings
    sockets = [tmp_path / f"kv-pool-{number}.sock" for number in range(2)]

    @asynccontextmanager
    async def pool(path: Path) -> AsyncIterator[None]:
        server = partial(PoolServer, path, new_host(TierSettings(host="1MiB"), time.monotonic))
        async with running(given, path.stem, ProcessRole.POOL) as process, Scope("pool") as scope:
            scope.start(_serve_and_report(path, server, process), "pool")
            while not path.exists():
                await asyncio.sleep(0.01)
            yield
            scope.cancel()

    async with pool(sockets[0]):
        assert await asyncio.to_thread(main, ["cache", "stat", "--pool"]) == 0
        assert f"{sockets[0]}: 0 workers" in capsys.readouterr().out
        async with pool(sockets[1]):
            assert await asyncio.to_thread(main, ["cache", "stat", "--pool"]) == 2
            assert f"2 pools are running (choose one with --pool: {sockets[0]}, {sockets[1]})" in (
                capsys.readouterr().err
            )
