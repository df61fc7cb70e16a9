"""The KV tiers of a worker, as its settings say."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from kvolt.cli.flags import option, switch
from kvolt.core.card import EngineInfo
from kvolt.core.errors import ConfigError, InvalidRequest, Unsupported
from kvolt.core.kv_events import KvChange, Tier
from kvolt.engines.contract import Engine
from kvolt.kv.disk import fp8
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.tier import DiskTier, Watermarks
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.tier import ObjectTier
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.admission import Admission
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.peer_server import PeerServer
from kvolt.kv.tiers.peer_tier import PeerTier
from kvolt.kv.tiers.sizes import parse_capacity
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.config.settings import TierSettings, WorkerSettings
from kvolt.runtime.host.environment import cache_directory
from kvolt.runtime.host.memory import free_bytes
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.nixl import library as nixl_library
from kvolt.worker.tiering import TieredEngine, Tiering, TieringFactory

log = logging.getLogger(__name__)

_NEEDED = {"KvVisible", "KvMovable", "KvAddressable", "KvTierable", "Prefill"}
_MIN_BLOCKS = 4
_STAGING_BYTES = 256 << 20
"""Of the host's memory, where a tier is wanted below it and none in it: what blocks pass through."""


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
    option(group, "--kv-object", "URL", "Store: s3://BUCKET/PREFIX, gs://, az:// or a folder.")
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
    _watermarks(tiers)
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


def tiering_of(tiers: TierSettings, new_agent: Callable[[], TransferAgent]) -> TieringFactory | None:
    """Factory of a worker's tiering; None without tiers. `new_agent` creates the agent for transfers to peers."""
    if not are_wanted(tiers):
        return None
    agent = new_agent() if tiers.peers else None

    def new(
        engine: Engine,
        info: EngineInfo,
        now: Callable[[], float],
        tell: Callable[[tuple[KvChange, ...]], None],
    ) -> Tiering:
        if not set(info.features) >= _NEEDED:
            raise ConfigError(
                f"the {info.engine} engine does not support KV tiers in this setup",
                key="tiers",
                remedy="omit --kv-host, --kv-disk and --kv-object",
            )
        tiered = cast("TieredEngine", engine)
        slabs = tiered.kv_slabs()
        shape = BlockShape.of(slabs)
        num_device = info.capacity.kv_total_blocks
        num_host = host_blocks(tiers, shape, num_device)
        lower = lower_tiers(tiers, shape, num_device, now)
        peer_tier = None if agent is None else PeerTier(agent, now)
        if peer_tier is not None:
            # Order of access: local disk, peers, object store.
            is_far = [tier.tier is Tier.OBJECT for tier, _ in lower]
            lower.insert(is_far.index(True) if any(is_far) else len(lower), (peer_tier, 1))
        direct = None
        if tiers.disk_direct:
            direct = next(DirectReads(tier, slabs) for tier, _ in lower if isinstance(tier, DiskTier))
        cache = TieredCache.for_slabs(slabs, num_host, lower, tiers.eviction, direct)
        cache.host.set_pending_share(tiers.host_high_water)
        peers = None if agent is None or peer_tier is None else (peer_tier, PeerServer(cache.host, agent))
        admission = Admission(tiers.depth or None, tiers.min_priority, tiers.tenants)
        step_tokens = info.capacity.max_batch_tokens
        return Tiering(
            tiered, cache, now, tell, info.step_model, info.block_size, step_tokens, peers, admission
        )

    return new


def lower_tiers(
    tiers: TierSettings, shape: BlockShape, num_device: int, now: Callable[[], float]
) -> list[tuple[LowerTier, int]]:
    """Tiers below host memory, fastest first, each with the number of touches before a block is stored."""
    # Settings that may raise come first, resources last.
    store = None
    if tiers.object:
        store = ObjectBlocks(tiers.object, shape, is_packed=tiers.object_compression == "zstd")
    files = None
    if tiers.disk:
        form = Fp8.of(shape) if tiers.disk_compression == "fp8" else None
        if form is not None and not fp8.IS_NATIVE:
            log.warning(
                "native fp8 conversion unavailable: slower=10x remedy='install gcc or clang and reinstall kvolt'"
            )
        at_rest = shape if form is None else form.packed(shape)
        num_slots = parse_capacity(tiers.disk, "tiers.disk").blocks(at_rest.slot_bytes, num_device)
        _check_size(num_slots, at_rest, "disk")
        files = DiskFiles(_folder(tiers.disk_dir), shape, num_slots, form)
    lower: list[tuple[LowerTier, int]] = []
    if tiers.pool:
        lower.append((PoolTier(Path(tiers.pool).expanduser().absolute(), shape, now), 1))
    if files is not None:
        lower.append((DiskTier(files, tiers.eviction, _watermarks(tiers)), tiers.disk_touches))
    if store is not None:
        lower.append((ObjectTier(store, now), tiers.object_touches))
    return lower


def _watermarks(tiers: TierSettings) -> Watermarks:
    """Watermarks of the disk tier. Raises ConfigError if they are invalid."""
    return Watermarks(tiers.disk_low_water, tiers.disk_high_water)


def host_blocks(tiers: TierSettings, shape: BlockShape, num_device: int) -> int:
    """Number of blocks of the host tier. Raises ConfigError if it is too small or exceeds the free memory."""
    num_blocks = max(_STAGING_BYTES // shape.slot_bytes, _MIN_BLOCKS)
    if tiers.host:
        num_blocks = parse_capacity(tiers.host, "tiers.host").blocks(shape.slot_bytes, num_device)
    _check_size(num_blocks, shape, "host")
    _check_memory(num_blocks, shape)
    return num_blocks


def _check_size(num_blocks: int, shape: BlockShape, tier: str) -> None:
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"the {tier} tier would hold {num_blocks} blocks of {shape.slot_bytes:,} bytes",
            key=f"tiers.{tier}",
            remedy=f"use {_MIN_BLOCKS * shape.slot_bytes:,} bytes or more, or omit it",
        )


def _check_memory(num_blocks: int, shape: BlockShape) -> None:
    num_bytes, available = num_blocks * shape.slot_bytes, free_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"the host tier needs {num_bytes / 2**30:.1f} GiB, but only {available / 2**30:.1f} GiB are free",
            key="tiers.host",
            remedy="reduce it, or add a disk tier (--kv-disk)",
        )


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute() if text else cache_directory() / "kv"


class NewSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /kv_tiers/resize`: sizes as in the flags; None keeps a size."""

    host: str | None = None
    disk: str | None = None


async def resize_tiers(tiering: Tiering | None, body: bytes) -> dict[str, dict[str, int | None]]:
    """Resize the tiers of a running worker; return the blocks and capacity of each.

    Raises InvalidRequest or Unsupported.
    """
    if tiering is None:
        raise Unsupported("this worker has no KV tiers", feature="kv_tiers")
    try:
        sizes = msgspec.json.decode(body or b"{}", type=NewSizes)
    except MALFORMED as error:
        raise InvalidRequest(f'{error} (for example {{"host": "16GiB"}})', param="body") from None
    host = tiering.cache.host
    for tier, text in ((Tier.HOST, sizes.host), (Tier.DISK, sizes.disk)):
        if text is None:
            continue
        try:
            num_device = tiering.cache.num_device_blocks
            shape = host.shape_in(tier)
            num_blocks = parse_capacity(text, tier).blocks(shape.slot_bytes, num_device)
            _check_size(num_blocks, shape, tier)
            if tier is Tier.HOST:
                _check_memory(num_blocks - host.memory.num_allocated, host.shape)
        except ConfigError as error:
            raise InvalidRequest(f"{error.message}: {error.fields['remedy']}", param=tier) from None
        await host.resize(tier, num_blocks)
        log.info("tier resized: tier=%s capacity_blocks=%d", tier, num_blocks)
    tiering.publish_changes()
    return {
        tier: dict(zip(("blocks", "capacity_blocks"), host.size(tier), strict=True)) for tier in host.stats
    }
