"""Flags and settings of a worker's KV tiers. Builds none: `kvolt serve` and workers without tiers need no more."""

from __future__ import annotations

import argparse

import msgspec

from kvolt.cli.flags import option, switch
from kvolt.core.errors import ConfigError
from kvolt.kv.tiers.sizes import Watermarks, parse_capacity
from kvolt.runtime.config.settings import TierSettings, WorkerSettings
from kvolt.transfer.paths import nixl_library


def add_tier_flags(parser: argparse.ArgumentParser, is_brief: bool = False) -> argparse._ArgumentGroup:
    """Add the `--kv-...` flags. `is_brief` hides the rarely used ones from `--help`."""
    group = parser.add_argument_group(
        "KV offloading" + (" (more: `kvolt worker --help`)" if is_brief else ""),
    )

    def rare(text: str) -> str:
        return argparse.SUPPRESS if is_brief else text

    option(group, "--kv-host", "SIZE", "Host memory for KV: 4GiB, 1000blocks, or 2x the device's.")
    option(group, "--kv-disk", "SIZE", "Disk space for KV, which survives restarts.")
    option(group, "--kv-disk-dir", "DIR", "Its directory. Default: in the user's cache directory.")
    group.add_argument(
        "--kv-disk-compression",
        choices=("none", "fp8"),
        help=rare("fp8: 8 bits per value, lossy, 2 to 4 times the capacity."),
    )
    switch(
        group,
        "--kv-disk-direct",
        rare("Read from disk into the GPU (NIXL, GPUDirect Storage)."),
    )
    option(group, "--kv-object", "URL", rare("Store: s3://BUCKET/PREFIX, gs://, az:// or a folder."))
    group.add_argument(
        "--kv-pool",
        metavar="SOCKET",
        help=rare("Use the pool of a `kvolt cache serve` on this host."),
    )
    switch(group, "--kv-peers", "Onboard blocks from tiers of other workers.")
    return group


def with_tiers(group: WorkerSettings, args: argparse.Namespace) -> WorkerSettings:
    """The group with the KV tiers of the flags."""
    flags = {
        "host": args.kv_host,
        "disk": args.kv_disk,
        "disk_dir": args.kv_disk_dir,
        "disk_compression": getattr(args, "kv_disk_compression", None),
        "disk_direct": args.kv_disk_direct or None,
        "object": args.kv_object,
        "pool": args.kv_pool,
        "peers": args.kv_peers or None,
        "shared": getattr(args, "kv_shared", None) or None,
    }
    changes = {key: value for key, value in flags.items() if value is not None}
    tiers = msgspec.structs.replace(group.tiers, **changes)
    check_sizes(tiers)
    return msgspec.structs.replace(group, tiers=tiers)


def check_sizes(tiers: TierSettings) -> None:
    """Raise ConfigError for invalid sizes and for tiers that cannot be combined."""
    sizes = {
        key: parse_capacity(text, f"tiers.{key}") for key in ("host", "disk") if (text := getattr(tiers, key))
    }
    Watermarks(tiers.disk_low_water, tiers.disk_high_water)
    if not 0.0 <= tiers.host_high_water <= 0.5:
        raise ConfigError(
            f"host_high_water is {tiers.host_high_water:g}",
            key="tiers.host_high_water",
            remedy="must be 0 to 0.5",
        )
    if tiers.disk_compression != "none" and (tiers.object or tiers.peers or tiers.pool):
        raise ConfigError(
            "disk_compression = fp8 is lossy and cannot be combined with an object store, a pool or peers",
            key="tiers.disk_compression",
            remedy="omit --kv-disk-compression, or --kv-object, --kv-pool and --kv-peers",
        )
    if tiers.disk_direct:
        _check_direct(tiers)
    if tiers.peers and not tiers.host:
        raise ConfigError(
            "--kv-peers requires a host tier",
            key="tiers.host",
            remedy="for example --kv-host 8GiB",
        )
    if tiers.peers and (tiers.pool or tiers.shared):
        raise ConfigError(
            "--kv-peers and a KV pool are mutually exclusive",
            key="tiers.peers",
            remedy="omit --kv-peers, or --kv-pool and --kv-shared",
        )
    if not tiers.shared:
        return
    if "host" not in sizes:
        raise ConfigError(
            "--kv-shared requires a host tier", key="tiers.host", remedy="for example --kv-host 8GiB"
        )
    if any(size.device_ratio for size in sizes.values()):
        raise ConfigError(
            "the size of a KV pool cannot be relative to the device",
            key="tiers.host",
            remedy="for example 64GiB",
        )
    if tiers.pool:
        raise ConfigError(
            "--kv-shared and --kv-pool are mutually exclusive",
            key="tiers.pool",
            remedy="use --kv-shared to start a pool, or --kv-pool to use a running one",
        )


def _check_direct(tiers: TierSettings) -> None:
    if not tiers.disk or tiers.pool or tiers.shared:
        raise ConfigError(
            "--kv-disk-direct requires a disk tier of the worker itself",
            key="tiers.disk_direct",
            remedy="use --kv-disk without a pool, or omit --kv-disk-direct",
        )
    if tiers.disk_compression != "none":
        raise ConfigError(
            "--kv-disk-direct and --kv-disk-compression are mutually exclusive",
            key="tiers.disk_direct",
            remedy="omit one of them",
        )
    if nixl_library.find_package() is None:
        raise ConfigError(
            "--kv-disk-direct requires NIXL, which is not installed",
            key="tiers.disk_direct",
            remedy=nixl_library.REMEDY,
        )


def are_wanted(tiers: TierSettings) -> bool:
    return bool(tiers.host or tiers.disk or tiers.object or tiers.pool)
