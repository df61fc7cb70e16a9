"""Command line of a KV pool process, and the pools that `kvolt serve` starts for its workers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvolt.cli.worker.tier_settings import check_sizes
from kvolt.runtime.config.settings import Settings, TierSettings, WorkerSettings
from kvolt.runtime.supervisor.supervisor import ChildSpec

_MAX_PATH_BYTES = 100
"""Linux limits socket paths to 107 bytes."""
POOL_NAME = "kv-pool"
TIER_FIELDS = (
    "host", "host_high_water", "disk", "disk_dir", "disk_touches", "disk_compression", "disk_low_water",
    "disk_high_water", "object", "object_touches", "object_compression", "eviction",
)  # fmt: skip
"""Fields of TierSettings that are flags of a pool."""
_LAST = -1
"""Stop stage of pools: after the workers."""


def serve_command(
    socket: Path, tiers: TierSettings, name: str = POOL_NAME, config: Path | None = None
) -> tuple[str, ...]:
    """Command line of a pool with these tiers. `config` is the workers' config file, for publishing KV events."""
    command = [sys.executable, "-m", "kvolt", "cache", "serve", "--name", name, "--socket", str(socket)]
    if config is not None:
        command += ["--config", str(config)]
    for field in TIER_FIELDS:
        if (value := getattr(tiers, field)) != "":
            command += [f"--{field.replace('_', '-')}", str(value)]
    return tuple(command)


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
