"""Builds the KV tiers of a worker from its settings (`tier_settings`)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from kvolt.cli.worker.tier_settings import are_wanted
from kvolt.core.card import EngineInfo
from kvolt.core.errors import MALFORMED, ConfigError, InvalidRequest, Unsupported
from kvolt.core.kv_events import KvChange, Tier
from kvolt.engines.contract import Engine
from kvolt.kv.disk import fp8
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.tier import ObjectTier
from kvolt.kv.peers.server import PeerServer
from kvolt.kv.peers.tier import PeerTier
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.admission import TierAdmission
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.sizes import Watermarks, parse_capacity
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.config.settings import TierSettings
from kvolt.runtime.host.environment import cache_directory
from kvolt.runtime.host.memory import free_bytes
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.peer.handshakes import TlsContexts
from kvolt.worker.kv.tiering import TieredEngine, Tiering, TieringFactory

log = logging.getLogger(__name__)

_NEEDED = {"KvVisible", "KvMovable", "KvAddressable", "KvTierable", "Prefill"}
_MIN_BLOCKS = 4
_STAGING_BYTES = 256 << 20
"""Host memory that blocks pass through if there is a tier below the host and none in it."""


def tiering_of(
    tiers: TierSettings, new_agent: Callable[[], TransferAgent], credentials: TlsContexts | None = None
) -> TieringFactory | None:
    """Factory of a worker's tiering; None without tiers. `new_agent` creates the agent for transfers to peers.
    `credentials`: for transfers to a shared pool."""
    if not are_wanted(tiers):
        return None
    agent = new_agent() if tiers.peers else None

    def new(
        engine: Engine,
        info: EngineInfo,
        now: Callable[[], float],
        publish: Callable[[tuple[KvChange, ...]], None],
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
        lower = lower_tiers(tiers, shape, num_device, now, credentials)
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
        admission = TierAdmission(tiers.depth or None, tiers.min_priority, tiers.tenants)
        step_tokens = info.capacity.max_batch_tokens
        return Tiering(
            tiered, cache, now, publish, info.step_model, info.block_size, step_tokens, peers, admission
        )

    return new


def lower_tiers(
    tiers: TierSettings,
    shape: BlockShape,
    num_device: int,
    now: Callable[[], float],
    credentials: TlsContexts | None = None,
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
        files = DiskFiles(disk_folder(tiers.disk_dir), shape, num_slots, form)
        _check_disk(files)
    lower: list[tuple[LowerTier, int]] = []
    if tiers.pool:
        lower.append((PoolTier(Path(tiers.pool).expanduser().absolute(), shape, now, credentials), 1))
    if files is not None:
        lower.append(
            (
                DiskTier(files, tiers.eviction, Watermarks(tiers.disk_low_water, tiers.disk_high_water)),
                tiers.disk_touches,
            )
        )
    if store is not None:
        lower.append((ObjectTier(store, now), tiers.object_touches))
    return lower


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


def _check_disk(files: DiskFiles) -> None:
    """Warn if the tier is larger than what its disk has free."""
    stored = sum(path.stat().st_blocks * 512 for path in files.folder.glob("blocks-*"))
    num_bytes, available = (
        files.num_slots * files.shape.slot_bytes,
        shutil.disk_usage(files.folder).free + stored,
    )
    if num_bytes > available:
        log.warning(
            "disk tier larger than the free space: size=%.1fGiB free=%.1fGiB folder=%s; blocks that do not fit are not "
            "stored; reduce --kv-disk",
            num_bytes / 2**30,
            available / 2**30,
            files.folder,
        )


def disk_folder(text: str) -> Path:
    """Folder of the disk tier for the setting `disk_dir`."""
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
