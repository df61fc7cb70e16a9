"""`kvolt cache serve`: process of a KV pool shared by the workers of a host; its status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvolt.api.cluster import visit
from kvolt.cli.cache.pool_command import POOL_NAME, TIER_FIELDS
from kvolt.cli.flags import add_settings, option
from kvolt.cli.process import Process, raise_open_file_limit, run_loop, run_process
from kvolt.cli.worker.tier_settings import check_sizes
from kvolt.cli.worker.tiers import host_blocks, lower_tiers
from kvolt.core.errors import ConfigError, DiscoveryLost
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.wire import PoolStatus, Status
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.models.fetch_progress import size_text
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig, load
from kvolt.runtime.config.settings import TierSettings
from kvolt.runtime.host.environment import cache_directory
from kvolt.runtime.security.identity import ProcessRole
from kvolt.worker.kv.pool_event_publisher import PoolEventPublisher

_ANSWER_S = 5.0
_SOCKET_DETAILS = "pool_socket"
"""Section of a pool's status with the path of its socket."""
_TOUCHES = range(1, 16)
_MAX_OPEN_FILES = 65_536
"""Each worker maps every memory segment."""


def default_socket() -> Path:
    return cache_directory() / "pool.sock"


def configure_serve(parser: argparse.ArgumentParser) -> None:
    option(parser, "--name", None, "Name of this process in logs and status.", default=POOL_NAME)
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
    add_settings(parser, ("discovery", "network", "join token", "logging"))


def serve_pool(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    tiers = TierSettings(**{field: getattr(args, field) for field in TIER_FIELDS})
    check_sizes(msgspec.structs.replace(tiers, shared=True))
    raise_open_file_limit(_MAX_OPEN_FILES)
    path = Path(args.socket).expanduser() if args.socket else default_socket()
    server = partial(PoolServer, path, new_host(tiers, SystemClock().monotonic))
    return run_process(loaded.settings, args.name, partial(_serve_and_report, path, server), ProcessRole.POOL)


async def _serve_and_report(path: Path, new_server: Callable[..., PoolServer], process: Process) -> None:
    """Serve until cancelled. The publisher starts first, so that routers know the pool before workers report it."""
    server = new_server(credentials=process.runtime.ports.credentials)
    publisher = PoolEventPublisher(process.runtime, process.settings.namespace)
    publisher.attach(server, await publisher.start())
    process.runtime.add_status_details(_SOCKET_DETAILS, lambda: str(path.absolute()))
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


async def _running_socket() -> Path:
    """Socket of the pool that runs on this machine, found as `kvolt status` finds it; else the default socket."""
    try:
        async with visit(load().settings) as cluster:
            views = await cluster.list_processes()
    except DiscoveryLost:
        views = []
    paths = {view.status.details.get(_SOCKET_DETAILS) for view in views if view.status is not None}
    sockets = [
        Path(path) for path in sorted(each for each in paths if isinstance(each, str)) if _exists(path)
    ]
    if len(sockets) > 1:
        raise ConfigError(
            f"{len(sockets)} pools are running",
            key="pool",
            remedy="choose one with --pool: " + ", ".join(map(str, sockets)),
        )
    return sockets[0] if sockets else default_socket()


def _exists(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # what another process says may be no path
        return Path(path).exists()
    return False


def stat_pool(args: argparse.Namespace) -> int:
    named_path = Path(args.pool).expanduser() if args.pool else None

    async def main() -> int:
        path = named_path or await _running_socket()
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
