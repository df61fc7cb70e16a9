"""CPU cores of the machine, and how they are divided among local engines.

Two engines that both use all cores spend their time waiting for each other's threads (two threads each on two cores
are enough), so every engine gets its own cores and the matching number of threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.cgroups import MEMBERSHIP, ROOT, own_groups

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def share_cores(available: Sequence[int], num_engines: int, reserved: int) -> list[list[int]]:
    """Divide cores among engines: contiguous shares whose sizes differ by at most one.

    The first `reserved` cores stay free for the frontend and other processes, as long as every engine still gets one.
    With more engines than cores, each gets one core, in rotation.
    """
    if not available:
        raise ConfigError("no CPU core is available", remedy="allow this process at least one core")
    if num_engines >= len(available):
        return [[available[engine % len(available)]] for engine in range(num_engines)]
    if num_engines <= 0:
        return []
    free = available[min(max(reserved, 0), len(available) - num_engines) :]
    share_size, extra = divmod(len(free), num_engines)
    shares: list[list[int]] = []
    start = 0
    for engine in range(num_engines):
        end = start + share_size + (1 if engine < extra else 0)
        shares.append(list(free[start:end]))
        start = end
    return shares


def thread_env(cores: Sequence[int]) -> dict[str, str]:
    """Environment that limits a child's thread pools to its share of cores."""
    env = dict.fromkeys(_THREAD_COUNTS, str(max(1, len(cores))))
    # Engines get token ids, so tokenizer threads would only compete with the compute threads.
    return {**env, "TOKENIZERS_PARALLELISM": "false"}


def usable_cores(cgroup_root: Path = ROOT, membership: Path = MEMBERSHIP) -> tuple[int, ...]:
    """Usable cores: the affinity mask, cut to the number that the cgroup's CPU quota allows.

    Below a quota the ids are only a count: pinning to them would put every container of the machine on the same cores.
    """
    # macOS has no affinity mask; use all cores.
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    ids = tuple(sorted(mask))
    quota = cpu_quota(cgroup_root, membership)
    if quota is None or quota >= len(ids):
        return ids
    return ids[: max(1, int(quota))]


def cpu_quota(cgroup_root: Path, membership: Path) -> float | None:
    """Smallest cgroup v2 CPU quota in cores, from this process's group up to the root; None: no quota."""
    quotas = []
    for folder in own_groups(cgroup_root, membership):
        with contextlib.suppress(OSError):  # the root group has none
            quotas.append(parse_cpu_max((folder / "cpu.max").read_text()))
    return min((quota for quota in quotas if quota is not None), default=None)


def parse_cpu_max(text: str) -> float | None:
    """`"150000 100000"` (microseconds per period) is 1.5 cores; `"max 100000"` is no quota."""
    match text.split():
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            return int(quota) / int(period)
    return None
