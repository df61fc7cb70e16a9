"""The KV tiers of a worker, as its settings say."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.errors import ConfigError, InvalidRequest, Unsupported
from kvolt.core.kv_events import KvChange, Tier
from kvolt.engines.contract import Engine
from kvolt.kv.disk import fp8 as eight_bits
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import EightBits
from kvolt.kv.disk.tier import DiskTier, Watermarks
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.tier import ObjectTier
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.admission import Admission
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.peer_server import PeerGiving
from kvolt.kv.tiers.peer_tier import PeerTier
from kvolt.kv.tiers.sizes import parse_capacity
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.config.settings import WorkerSettings
from kvolt.runtime.config.tier_settings import TierSettings
from kvolt.runtime.host.cache_directory import cache_directory
from kvolt.runtime.host.memory import free_bytes
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.nixl import library as nixl_library
from kvolt.worker.tiering import NewTiering, TieredEngine, Tiering

log = logging.getLogger(__name__)

_NEEDED = {"KvVisible", "KvMovable", "KvPlaced", "KvTierable", "Prefill"}
_LEAST_BLOCKS = 4
_STAGING_BYTES = 256 << 20
"""Of the host's memory, where a tier is wanted below it and none in it: what blocks pass through."""


def add_tier_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-host",
        metavar="SIZE",
        help="keep KV that leaves the device in the host's memory: 4GiB, 1000blocks, or 2x what the device holds",
    )
    parser.add_argument("--kv-disk", metavar="SIZE", help="and below that on a disk, which survives restarts")
    parser.add_argument("--kv-disk-dir", metavar="DIR", help="where (default: the user's cache folder)")
    parser.add_argument(
        "--kv-disk-compression",
        choices=("none", "fp8"),
        help="fp8: eight bits for each value there, lossy, for two to four times as many blocks (default: none)",
    )
    parser.add_argument(
        "--kv-disk-direct",
        action="store_true",
        help="bring it back from there past the host's memory, by NIXL and GPUDirect Storage",
    )
    parser.add_argument(
        "--kv-object",
        metavar="URL",
        help="and in a store that all workers share: s3://bucket/folder, gs://, az://, or a shared folder's path",
    )
    parser.add_argument(
        "--kv-pool",
        metavar="SOCKET",
        help="in the pool of a `kvolt cache serve` on this host, besides or in place",
    )
    parser.add_argument(
        "--kv-peers",
        action="store_true",
        help="fetch KV from other workers' tiers, too, where a router knows of more there, and give them ours",
    )


def with_tiers(group: WorkerSettings, args: argparse.Namespace) -> WorkerSettings:
    """The same group with the tiers that flags say."""
    given = {
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
    said = {key: value for key, value in given.items() if value is not None}
    tiers = msgspec.structs.replace(group.tiers, **said)
    check_sizes(tiers)
    return msgspec.structs.replace(group, tiers=tiers)


def check_sizes(tiers: TierSettings) -> None:
    """ConfigError for what is no size, and for a pool that cannot be."""
    sizes = {
        key: parse_capacity(text, f"tiers.{key}") for key in ("host", "disk") if (text := getattr(tiers, key))
    }
    _watermarks(tiers)
    if not 0.0 <= tiers.host_high_water <= 0.5:
        raise ConfigError(
            f"a share of {tiers.host_high_water:g} of the host for blocks that wait is none",
            key="tiers.host_high_water",
            remedy="half of it at most: the rest is for blocks that are asked for",
        )
    if tiers.disk_compression != "none" and (tiers.object or tiers.peers or tiers.pool):
        raise ConfigError(
            "what comes back from eight bits is not exact: a store, a pool and other workers would take it for that",
            key="tiers.disk_compression",
            remedy="leave out --kv-disk-compression, or --kv-object, --kv-pool and --kv-peers",
        )
    if tiers.disk_direct:
        _check_direct(tiers)
    if tiers.peers and not tiers.host:
        raise ConfigError(
            "workers give each other what is in the host's memory",
            key="tiers.host",
            remedy="say how much: --kv-host 8GiB",
        )
    if tiers.peers and (tiers.pool or tiers.shared):
        raise ConfigError(
            "blocks come from a pool or from other workers, not from both",
            key="tiers.peers",
            remedy="leave out --kv-peers, or --kv-pool and --kv-shared",
        )
    if not tiers.shared:
        return
    if "host" not in sizes:
        raise ConfigError(
            "a shared pool needs memory of the host", key="tiers.host", remedy="say how much: --kv-host 8GiB"
        )
    if any(size.of_device for size in sizes.values()):
        raise ConfigError(
            "a pool has no device that it could be twice as large as", key="tiers.host", remedy="say 64GiB"
        )
    if tiers.pool:
        raise ConfigError(
            "tiers are in a pool that this starts, or in one that there is",
            key="tiers.pool",
            remedy="give --kv-shared or --kv-pool",
        )


def _check_direct(tiers: TierSettings) -> None:
    if not tiers.disk or tiers.pool or tiers.shared:
        raise ConfigError(
            "blocks come straight from a worker's own disk, and there is none",
            key="tiers.disk_direct",
            remedy="give --kv-disk 200GiB and no pool, or leave out --kv-disk-direct",
        )
    if tiers.disk_compression != "none":
        raise ConfigError(
            "what lies on a disk in eight bits is not what goes straight into the engine's memory",
            key="tiers.disk_direct",
            remedy="leave out --kv-disk-direct or --kv-disk-compression",
        )
    if nixl_library.find() is None:
        raise ConfigError(
            "blocks come straight from a disk by NIXL, which is not installed",
            key="tiers.disk_direct",
            remedy=nixl_library.REMEDY,
        )


def are_wanted(tiers: TierSettings) -> bool:
    return bool(tiers.host or tiers.disk or tiers.object or tiers.pool)


def tiering_of(tiers: TierSettings, new_agent: Callable[[], TransferAgent]) -> NewTiering | None:
    """How a worker makes its own; None where none is wanted. `new_agent`: for what goes to other workers."""
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
                f"the {info.engine} engine does not let others keep its KV in this setup",
                key="tiers",
                remedy="leave out --kv-host, --kv-disk and --kv-object",
            )
        tiered = cast("TieredEngine", engine)
        slabs = tiered.kv_slabs()
        shape = BlockShape.of(slabs)
        num_device = info.capacity.kv_total_blocks
        num_host = host_blocks(tiers, shape, num_device)
        lower = lower_tiers(tiers, shape, num_device, now)
        others = None if agent is None else PeerTier(agent, now)
        if others is not None:
            # Before a store, which is farther for everybody; a disk of one's own is nearer.
            is_far = [tier.tier is Tier.OBJECT for tier, _ in lower]
            lower.insert(is_far.index(True) if any(is_far) else len(lower), (others, 1))
        direct = None
        if tiers.disk_direct:
            direct = next(DirectReads(tier, slabs) for tier, _ in lower if isinstance(tier, DiskTier))
        cache = TieredCache.over(slabs, num_host, lower, tiers.eviction, direct)
        cache.host.keep_for_below(tiers.host_high_water)
        peers = None if agent is None or others is None else (others, PeerGiving(cache.host, agent))
        admission = Admission(tiers.depth or None, tiers.min_priority, tiers.tenants)
        step_tokens = info.capacity.max_batch_tokens
        return Tiering(
            tiered, cache, now, tell, info.step_model, info.block_size, step_tokens, peers, admission
        )

    return new


def lower_tiers(
    tiers: TierSettings, shape: BlockShape, num_device: int, now: Callable[[], float]
) -> list[tuple[LowerTier, int]]:
    """Those below the host's memory, the fastest first, and how often a block is seen before it goes there."""
    # What may be refused first, and what holds something last.
    store = None
    if tiers.object:
        store = ObjectBlocks(tiers.object, shape, is_packed=tiers.object_compression == "zstd")
    files = None
    if tiers.disk:
        form = EightBits.of(shape) if tiers.disk_compression == "fp8" else None
        if form is not None and not eight_bits.IS_NATIVE:
            log.warning(
                "numpy turns blocks into eight bits, at a tenth of the speed: `pip install` kvolt where a C compiler is"
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
    """ConfigError for such as cannot be."""
    return Watermarks(tiers.disk_low_water, tiers.disk_high_water)


def host_blocks(tiers: TierSettings, shape: BlockShape, num_device: int) -> int:
    """Of the host's tier. ConfigError for too few, or more than there is memory for."""
    num_blocks = max(_STAGING_BYTES // shape.slot_bytes, _LEAST_BLOCKS)
    if tiers.host:
        num_blocks = parse_capacity(tiers.host, "tiers.host").blocks(shape.slot_bytes, num_device)
    _check_host(num_blocks, shape)
    return num_blocks


def _check_size(num_blocks: int, shape: BlockShape, tier: str) -> None:
    if num_blocks < _LEAST_BLOCKS:
        raise ConfigError(
            f"the {tier} tier would hold {num_blocks} blocks of {shape.slot_bytes:,} bytes",
            key=f"tiers.{tier}",
            remedy=f"give it {_LEAST_BLOCKS * shape.slot_bytes:,} bytes or more, or leave it out",
        )


def _check_host(num_blocks: int, shape: BlockShape) -> None:
    _check_size(num_blocks, shape, "host")
    _check_memory(num_blocks, shape)


def _check_memory(num_blocks: int, shape: BlockShape) -> None:
    num_bytes, available = num_blocks * shape.slot_bytes, free_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"the host tier would take {num_bytes / 2**30:.1f} GiB, and the host has {available / 2**30:.1f} GiB left",
            key="tiers.host",
            remedy="give it less; what does not fit can go to a disk (--kv-disk)",
        )


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute() if text else cache_directory() / "kv"


class NewSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /kv_tiers/resize` takes, as flags do; what is not named stays."""

    host: str | None = None
    disk: str | None = None


async def resize_tiers(tiering: Tiering | None, body: bytes) -> dict[str, dict[str, int | None]]:
    """Tiers of a worker, while it serves; how many blocks each can hold and has then. InvalidRequest, Unsupported."""
    if tiering is None:
        raise Unsupported("this worker has no KV tiers", feature="kv_tiers")
    try:
        sizes = msgspec.json.decode(body or b"{}", type=NewSizes)
    except MALFORMED as error:
        raise InvalidRequest(f'{error}; say for example {{"host": "16GiB"}}', param="body") from None
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
                _check_memory(num_blocks - host.memory.num_reached, host.shape)
        except ConfigError as error:
            raise InvalidRequest(f"{error.message}: {error.fields['remedy']}", param=tier) from None
        await host.resize(tier, num_blocks)
        log.info("the %s tier holds %d blocks from now on", tier, num_blocks)
    tiering.tell_changes()
    return {
        tier: dict(zip(("blocks", "capacity_blocks"), host.size(tier), strict=True)) for tier in host.stats
    }
