"""Shared KV pools that `kvolt serve` starts for its workers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvolt.cli.cache.shared_pool import serve_command, short_socket
from kvolt.cli.worker.tiers import check_sizes
from kvolt.runtime.config.settings import Settings, TierSettings, WorkerSettings
from kvolt.runtime.supervisor.supervisor import ChildSpec

_LAST = -1
"""Stop stage of pools: after the workers."""


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
