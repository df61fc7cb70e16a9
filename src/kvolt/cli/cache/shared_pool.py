"""`kvolt cache serve`: the process of a pool that the workers of a host share, and how it is from outside."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from kvolt.cli.flags import add_settings
from kvolt.cli.process import Process, allow_open_files, run_loop, run_process
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
from kvolt.runtime.config.tier_settings import TierSettings
from kvolt.runtime.host.cache_directory import cache_directory
from kvolt.worker.pool_event_publisher import PoolEventPublisher

_ANSWER_S = 5.0
_TOUCHES = range(1, 16)
_MOST_FILES = 65_536
"""A few for each part of its memory, at every worker."""
_MOST_PATH_BYTES = 100
"""Of a socket's path: Linux takes 107."""
_NAME = "kv-pool"
_SECTIONS = ("runtime", "discovery", "plane", "events", "admin", "log")


def default_socket() -> Path:
    return cache_directory() / "pool.sock"


def configure_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default=_NAME, help="name of this process in logs and status")
    parser.add_argument(
        "--socket", metavar="PATH", help=f"where workers find it (default: {default_socket()})"
    )
    parser.add_argument(
        "--host", required=True, metavar="SIZE", help="memory for blocks: 64GiB, or 1000blocks"
    )
    parser.add_argument("--disk", default="", metavar="SIZE", help="and below that on a disk")
    parser.add_argument(
        "--disk-dir", default="", metavar="DIR", help="where (default: the user's cache folder)"
    )
    parser.add_argument(
        "--disk-touches",
        type=int,
        default=1,
        choices=_TOUCHES,
        metavar="N",
        help="see docs/tiers.md (default: 1)",
    )
    parser.add_argument(
        "--disk-compression",
        choices=("none", "fp8"),
        default="none",
        help="fp8: eight bits for each value there, lossy (default: none)",
    )
    marks = TierSettings()
    for mark in ("host_high_water", "disk_low_water", "disk_high_water"):
        share = getattr(marks, mark)
        parser.add_argument(
            f"--{mark.replace('_', '-')}",
            type=float,
            default=share,
            metavar="SHARE",
            help=f"see docs/tiers.md (default: {share})",
        )
    parser.add_argument("--object", default="", metavar="URL", help="and in a store that other hosts share")
    parser.add_argument(
        "--object-touches",
        type=int,
        default=2,
        choices=_TOUCHES,
        metavar="N",
        help="see docs/tiers.md (default: 2)",
    )
    parser.add_argument(
        "--object-compression",
        choices=("none", "zstd"),
        default="none",
        help="how blocks are written there (default: none)",
    )
    parser.add_argument(
        "--eviction", choices=sorted(EVICTIONS), default="lru", help="which blocks go (default: lru)"
    )
    add_settings(parser, None, _SECTIONS)


def serve_command(
    socket: Path, tiers: TierSettings, name: str = _NAME, config: Path | None = None
) -> tuple[str, ...]:
    """What starts a pool with these tiers. `config`: of the workers, whose routers it tells what it has."""
    command = [sys.executable, "-m", "kvolt", "cache", "serve", "--name", name, "--socket", str(socket)]
    if config is not None:
        command += ["--config", str(config)]
    for field in (
        "host",
        "host_high_water",
        "disk",
        "disk_dir",
        "disk_touches",
        "disk_compression",
        "disk_low_water",
        "disk_high_water",
        "object",
        "object_touches",
        "object_compression",
        "eviction",
    ):
        if (value := getattr(tiers, field)) != "":
            command += [f"--{field.replace('_', '-')}", str(value)]
    return tuple(command)


def serve_pool(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    tiers = TierSettings(
        host=args.host,
        disk=args.disk,
        disk_dir=args.disk_dir,
        disk_touches=args.disk_touches,
        disk_compression=args.disk_compression,
        host_high_water=args.host_high_water,
        disk_low_water=args.disk_low_water,
        disk_high_water=args.disk_high_water,
        object=args.object,
        object_touches=args.object_touches,
        object_compression=args.object_compression,
        eviction=args.eviction,
    )
    check_sizes(msgspec.structs.replace(tiers, shared=True))
    allow_open_files(_MOST_FILES)
    path = Path(args.socket).expanduser() if args.socket else default_socket()
    server = partial(PoolServer, path, new_host(tiers, SystemClock().monotonic))
    return run_process(loaded.settings, args.name, partial(_serve_and_tell, path, server))


async def _serve_and_tell(path: Path, new_server: Callable[[], PoolServer], process: Process) -> None:
    """Until cancelled. Routers know its name before the first worker says it."""
    server = new_server()
    publisher = PoolEventPublisher(process.runtime, process.settings.namespace)
    publisher.follow(server, await publisher.start())
    try:
        await server.start()
        print(f"kvolt: a pool of KV for workers with --kv-pool {path}", flush=True)
        await asyncio.get_running_loop().create_future()
    finally:
        await server.close()


def new_host(tiers: TierSettings, now: Callable[[], float]) -> Callable[[BlockShape], HostTier]:
    def new(shape: BlockShape) -> HostTier:
        num_host = host_blocks(tiers, shape, 0)
        host = HostTier(shape, num_host, lower_tiers(tiers, shape, 0, now), tiers.eviction)
        host.keep_for_below(tiers.host_high_water)
        return host

    return new


def stat_pool(args: argparse.Namespace) -> int:
    path = Path(args.pool).expanduser() if args.pool else default_socket()

    async def main() -> int:
        link = PoolLink(path, None, SystemClock().monotonic)
        try:
            status = await link.ask(Status(), PoolStatus, _ANSWER_S)
        finally:
            await link.close()
        if args.json:
            print(msgspec.json.encode(status).decode())
            return 0
        print(f"{path}: {status.num_workers} workers")
        if status.shape is None:
            print("  no worker has said yet what its blocks are")
        else:
            for tier in status.tiers:
                most = "" if tier.most_blocks is None else f" of {tier.most_blocks:,}"
                size = size_text(tier.num_blocks * tier.block_bytes)
                print(f"  {tier.tier:6} {tier.num_blocks:,}{most} blocks, {size}")
        return 0

    return run_loop(main)


def short_socket(folder: Path, name: str) -> Path:
    """In this folder, or, where its path is too long for a socket's, in one for temporary files."""
    path = folder / name
    if len(os.fsencode(path)) < _MOST_PATH_BYTES:
        return path
    return Path(tempfile.mkdtemp(prefix="kvolt-")) / name
