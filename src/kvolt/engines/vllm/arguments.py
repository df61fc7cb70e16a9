"""Arguments of the vLLM adapter. vLLM's own arguments are passed through in `engine_args`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import ConfigError
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.sizes import parse_capacity
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.host.environment import cache_directory

_AtLeastOne = Annotated[int, Meta(ge=1)]


class VllmTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes per rank, as `8GiB`, `2000blocks` or `4x` (of the device)."""

    host: str = ""
    """Size of the host tier. Empty: no tiers."""
    disk: str = ""
    """Size of the disk tier below it, which survives restarts. Empty: none."""
    disk_dir: str = ""
    """Folder of the disk tier. Default: kvolt's cache folder."""


def num_host_blocks(tiers: VllmTiers, shape: BlockShape, num_device: int) -> int:
    num_blocks = parse_capacity(tiers.host, "tiers.host").blocks(shape.slot_bytes, num_device)
    if num_blocks < 1:
        raise ConfigError(
            f"{tiers.host} is less than one block of {shape.block_bytes} bytes",
            key="args.tiers.host",
            remedy="increase it",
        )
    return num_blocks


def _disk_folder(tiers: VllmTiers) -> Path:
    return Path(tiers.disk_dir).expanduser() if tiers.disk_dir else cache_directory() / "kv"


def names_folder(tiers: VllmTiers, identity: str) -> Path | None:
    """Folder with descriptions of the disk's blocks."""
    return _disk_folder(tiers) / f"vllm-{identity}-names" if tiers.disk else None


def lower_tiers(
    tiers: VllmTiers, shape: BlockShape, num_device: int, piece: str
) -> list[tuple[LowerTier, int]]:
    if not tiers.disk:
        return []
    num_slots = parse_capacity(tiers.disk, "tiers.disk").blocks(shape.slot_bytes, num_device)
    return [(DiskTier(DiskFiles(_disk_folder(tiers) / f"vllm-{piece}", shape, num_slots)), 1)]


class VllmArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `engine = "vllm"`."""

    served_name: str | None = None
    """Model name in the API. Default: the name given as `model`."""
    engine_args: dict[str, Any] = {}
    """Fields of vLLM's AsyncEngineArgs: `max_model_len`, `tensor_parallel_size`, `kv_transfer_config` ... (listed by
    `vllm serve --help`, with dashes)."""
    max_waiting: _AtLeastOne = 2048
    """Maximum number of waiting sequences; more are refused and retried on another worker."""
    kv_events: bool = True
    """Publish KV events for routers. Disable it if no router is KV-aware (round-robin)."""
    loras: dict[str, str] = {}
    """LoRA adapters to load at start: name to folder. Needs `engine_args.enable_lora`."""
    tiers: VllmTiers = VllmTiers()
    """Host and disk tiers for evicted KV (docs/engines.md)."""
    hold_s: Annotated[float, Meta(gt=0)] = 30.0
    """Time in seconds that a prefill worker holds a prompt's blocks without renewal by the decode worker, at most until
    the request's deadline."""
