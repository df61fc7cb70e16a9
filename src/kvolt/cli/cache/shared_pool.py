"""`kvolt cache serve`: process of a KV pool shared by the workers of a host; its status; pools of `kvolt serve`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from kvolt.cli.flags import add_settings, option
from kvolt.cli.process import Process, raise_open_file_limit, run_loop, run_process
from kvolt.cli.worker.tiers import check_sizes, host_blocks, lower_tiers
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.wire import PoolStatus, Status
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.models.fetch_progress import size_text
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import Settings, TierSettings, WorkerSettings
from kvolt.runtime.host.environment import cache_directory
from kvolt.runtime.supervisor.supervisor import ChildSpec
from kvolt.worker.pool_event_publisher import PoolEventPublisher

_ANSWER_S = 5.0
_TOUCHES = range(1, 16)
_MAX_OPEN_FILES = 65_536
"""Each worker maps every memory segment."""
_MAX_PATH_BYTES = 100
"""Linux limits socket paths to 107 bytes."""
_NAME = "kv-pool"
_TIER_FIELDS = (
    "host", "host_high_water", "disk", "disk_dir", "disk_touches", "disk_compression", "disk_low_water",
    "disk_high_water", "object", "object_touches", "object_compression", "eviction",
)  # fmt: skip
"""Fields of TierSettings that are flags of a pool."""
_LAST = -1
"""Stop stage of pools: after the workers."""


def default_socket() -> Path:
    return cache_directory() / "pool.sock"


def configure_serve(parser: argparse.ArgumentParser) -> None:
    option(parser, "--name", None, "Name of this process in logs and status.", default=_NAME)
    option(parser, "--socket", "PATH", f"Socket for workers. [default: {default_socket()}]")
    parser.add_argument(
        "--host", required=True, metavar="SIZE", help="Host memory for KV blocks: 64GiB, or 1000blocks."
    )
    parser.add_argument(
        "--disk", default="", metavar="SIZE", help="Disk space for KV blocks. Default: no disk tier."
    )
    parser.add_argument(
        "--disk-dir",
        default="",
        metavar="DIR",
        help="Directory of the disk tier. Default: the user's cache directory.",
    )
    option(
        parser,
        "--disk-touches",
        "N",
        "Write a block to disk after this many uses.",
        int,
        default=1,
        choices=_TOUCHES,
    )
    option(
        parser,
        "--disk-compression",
        None,
        "fp8 stores 8 bits per value on disk: lossy, two to four times the capacity.",
        default="none",
        choices=("none", "fp8"),
    )
    marks = TierSettings()
    for mark in ("host_high_water", "disk_low_water", "disk_high_water"):
        share = getattr(marks, mark)
        parser.add_argument(
            f"--{mark.replace('_', '-')}",
            type=float,
            default=share,
            metavar="SHARE",
            help=f"Setting workers.tiers.{mark} (`kvolt config describe`). [default: {share}]",
        )
    parser.add_argument(
        "--object", default="", metavar="URL", help="Object store shared with other hosts. Default: none."
    )
    option(
        parser,
        "--object-touches",
        "N",
        "Write a block to the object store after this many uses.",
        int,
        default=2,
        choices=_TOUCHES,
    )
    option(
        parser,
        "--object-compression",
        None,
        "Compression of blocks in the object store.",
        default="none",
        choices=("none", "zstd"),
    )
    option(parser, "--eviction", None, "Eviction policy.", default="lru", choices=sorted(EVICTIONS))
    add_settings(parser, ("discovery", "network", "logging", "metrics"))


def serve_command(
    socket: Path, tiers: TierSettings, name: str = _NAME, config: Path | None = None
) -> tuple[str, ...]:
    """Command line of a pool with these tiers. `config` is the workers' config file, for publishing KV events."""
    command = [sys.executable, "-m", "kvolt", "cache", "serve", "--name", name, "--socket", str(socket)]
    if config is not None:
        command += ["--config", str(config)]
    for field in _TIER_FIELDS:
        if (value := getattr(tiers, field)) != "":
            command += [f"--{field.replace('_', '-')}", str(value)]
    return tuple(command)


def serve_pool(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    tiers = TierSettings(**{field: getattr(args, field) for field in _TIER_FIELDS})
    check_sizes(msgspec.structs.replace(tiers, shared=True))
    raise_open_file_limit(_MAX_OPEN_FILES)
    path = Path(args.socket).expanduser() if args.socket else default_socket()
    server = partial(PoolServer, path, new_host(tiers, SystemClock().monotonic))
    return run_process(loaded.settings, args.name, partial(_serve_and_tell, path, server))


async def _serve_and_tell(path: Path, new_server: Callable[[], PoolServer], process: Process) -> None:
    """Serve until cancelled. The publisher starts first, so that routers know the pool before workers report it."""
    server = new_server()
    publisher = PoolEventPublisher(process.runtime, process.settings.namespace)
    publisher.attach(server, await publisher.start())
    try:
        await server.start()
        print(f"kvolt: serving a KV pool for workers with --kv-pool {path}", flush=True)
        await asyncio.get_running_loop().create_future()
    finally:
        await server.close()


def new_host(tiers: TierSettings, now: Callable[[], float]) -> Callable[[BlockShape], HostTier]:
    def new(shape: BlockShape) -> HostTier:
        num_host = host_blocks(tiers, shape, 0)
        host = HostTier(shape, num_host, lower_tiers(tiers, shape, 0, now), tiers.eviction)
        host.set_pending_share(tiers.host_high_water)
        return host

    return new


def stat_pool(args: argparse.Namespace) -> int:
    path = Path(args.pool).expanduser() if args.pool else default_socket()

    async def main() -> int:
        link = PoolLink(path, None, SystemClock().monotonic)
        try:
            status = await link.request(Status(), PoolStatus, _ANSWER_S)
        finally:
            await link.close()
        if args.json:
            print(msgspec.json.encode(status).decode())
            return 0
        print(f"{path}: {status.num_workers} workers")
        if status.shape is None:
            print("  empty: no worker has connected yet")
        else:
            for tier in status.tiers:
                limit = "" if tier.max_blocks is None else f" of {tier.max_blocks:,}"
                size = size_text(tier.num_blocks * tier.block_bytes)
                print(f"  {tier.tier:6} {tier.num_blocks:,}{limit} blocks, {size}")
        return 0

    return run_loop(main)


def short_socket(folder: Path, name: str) -> Path:
    """Socket path in `folder`, or in a temporary directory if that path is too long."""
    path = folder / name
    if len(os.fsencode(path)) < _MAX_PATH_BYTES:
        return path
    return Path(tempfile.mkdtemp(prefix="kvolt-")) / name


@contextmanager
def pools_of(
    settings: Settings, folder: Path, config: Path | None = None
) -> Iterator[tuple[Settings, list[ChildSpec]]]:
    """Settings in which workers with shared tiers use a pool, and the pool processes.

    Groups with equal model, arguments and tiers share one pool, so that decode workers find the blocks of prefill
    workers. `config` is the config file of the workers, also used by the pools.
    """
    sockets: dict[tuple[str, bytes, TierSettings], Path] = {}
    specs: list[ChildSpec] = []
    groups: list[WorkerSettings] = []
    for group in settings.workers:
        tiers = group.tiers
        if not tiers.shared:
            groups.append(group)
            continue
        check_sizes(tiers)
        # Different arguments, such as ranks or dtype, may give different blocks of the same model.
        key = (group.model, msgspec.json.encode(group.args, order="deterministic"), tiers)
        if key not in sockets:
            name = f"kv-pool-{len(sockets)}"
            sockets[key] = short_socket(folder, f"{name}.sock")
            specs.append(ChildSpec(name, serve_command(sockets[key], tiers, name, config), stage=_LAST))
        pooled_tiers = TierSettings(pool=str(sockets[key]), eviction=tiers.eviction)
        groups.append(msgspec.structs.replace(group, tiers=pooled_tiers))
    try:
        yield msgspec.structs.replace(settings, workers=groups), specs
    finally:
        for path in sockets.values():
            path.unlink(missing_ok=True)
            if path.parent != folder:
                shutil.rmtree(path.parent, ignore_errors=True)
