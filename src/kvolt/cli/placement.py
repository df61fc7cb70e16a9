"""Which worker of this machine gets which devices. Pure but for `visible_gpus`, which asks the system."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from kvolt.core.errors import ConfigError
from kvolt.runtime.settings import WorkerSettings

_ASK_S = 10.0


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that processes of this machine may use, by index or id; none where there is no driver."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def place(groups: Sequence[WorkerSettings], gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """The GPUs of each worker process, group by group in their order; empty where it takes none.

    A group that names its devices gives each of its processes as many of them as it has ranks, in turn; the others
    share the GPUs that nobody named, one for each rank. ConfigError when there are too few. Without any GPU all
    compute on the CPU.
    """
    named = {device for group in groups for device in group.devices}
    free = [gpu for gpu in gpus if gpu not in named]
    placed: list[tuple[str, ...]] = []
    for group in groups:
        ranks = int(group.args.get("tensor_parallel", 1))
        takes_none = (
            group.engine == "sim" or group.model.startswith("sim") or group.args.get("device") == "cpu"
        )
        pool = list(group.devices) or free
        for _ in range(group.count):
            if takes_none or (not pool and not gpus):
                placed.append(())
                continue
            if len(pool) < ranks:
                raise ConfigError(
                    f"workers {group.name!r}: {group.count} of {ranks} GPU{'s' * (ranks > 1)} each are more than "
                    f"the {len(group.devices) or len(gpus)} there are",
                    key="workers.devices",
                    remedy="lower count or tensor_parallel, or name more devices",
                )
            placed.append(tuple(pool[:ranks]))
            del pool[:ranks]
    return placed
