"""Assignment of GPUs to the workers of this machine. Pure except `visible_gpus`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from kvolt.core.errors import ConfigError
from kvolt.engines.registry import choose_engine
from kvolt.runtime.config.settings import WorkerSettings

_QUERY_TIMEOUT_S = 10.0


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs of this machine by index or UUID; empty without a driver."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(listed.stdout.split())


def place(groups: Sequence[WorkerSettings], gpus: Sequence[str]) -> list[tuple[str, ...]]:
    """GPUs of each worker process, in the order of the groups; empty if it uses none.

    A group with `devices` (or `cuda:N` in its arguments) distributes those over its processes, one per rank; the other
    groups share the remaining GPUs. Raises ConfigError if there are too few. Without GPUs all workers use the CPU.
    """
    named = [_named_devices(group, gpus) for group in groups]
    free = [gpu for gpu in gpus if not any(gpu in devices for devices in named)]
    placed: list[tuple[str, ...]] = []
    for group, devices in zip(groups, named, strict=True):
        ranks = int(group.args.get("tensor_parallel", 1))
        is_sim = choose_engine(group.engine, group.model)[0] == "sim"
        uses_no_gpu = is_sim or group.args.get("device") == "cpu"
        pool, num_available = devices or free, len(devices) or len(gpus)
        for _ in range(group.count):
            if uses_no_gpu or not num_available:
                placed.append(())
                continue
            if len(pool) < ranks:
                raise ConfigError(
                    f"workers {group.name!r}: {group.count} with {ranks} GPU{'s' * (ranks > 1)} each need more "
                    f"than the {num_available} available",
                    key="workers.devices",
                    remedy="lower count or tensor_parallel, or add devices",
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
    """Flags and environment of a worker with these GPUs: it sees only them, numbered from 0."""
    if not gpus:
        return (), {}
    ordinals = ",".join(str(number) for number in range(len(gpus)))
    return ("--devices", ordinals), {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
