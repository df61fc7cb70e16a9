"""Which worker of this machine gets which devices. Pure but for `visible_gpus`, which asks the system."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from kvolt.core.errors import ConfigError
from kvolt.engines.registry import choose_engine
from kvolt.runtime.config.settings import WorkerSettings

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

    A group that names its devices (or one, as `cuda:N` in its arguments) gives each of its processes as many of them as
    it has ranks, in turn; the others share the GPUs that nobody named, one for each rank. ConfigError when there are
    too few. Without any GPU all compute on the CPU.
    """
    named = [_named_devices(group, gpus) for group in groups]
    free = [gpu for gpu in gpus if not any(gpu in devices for devices in named)]
    placed: list[tuple[str, ...]] = []
    for group, devices in zip(groups, named, strict=True):
        ranks = int(group.args.get("tensor_parallel", 1))
        is_sim = choose_engine(group.engine, group.model)[0] == "sim"
        takes_none = is_sim or group.args.get("device") == "cpu"
        pool, num_there = devices or free, len(devices) or len(gpus)
        for _ in range(group.count):
            if takes_none or not num_there:
                placed.append(())
                continue
            if len(pool) < ranks:
                raise ConfigError(
                    f"workers {group.name!r}: {group.count} of {ranks} GPU{'s' * (ranks > 1)} each are more than "
                    f"the {num_there} there are",
                    key="workers.devices",
                    remedy="lower count or tensor_parallel, or name more devices",
                )
            placed.append(tuple(pool[:ranks]))
            del pool[:ranks]
    return placed


def _named_devices(group: WorkerSettings, gpus: Sequence[str]) -> list[str]:
    kind, _, index = str(group.args.get("device", "")).partition(":")
    if group.devices or kind != "cuda" or not index.isdigit():
        return [device.removeprefix("cuda:") for device in group.devices]
    return [gpus[int(index)] if int(index) < len(gpus) else index]


def device_flags(gpus: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and environment of a worker that was given these: it sees no others, and counts its own from 0."""
    if not gpus:
        return (), {}
    ordinals = ",".join(str(number) for number in range(len(gpus)))
    return ("--devices", ordinals), {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
