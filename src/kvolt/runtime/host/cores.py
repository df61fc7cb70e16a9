"""The machine's cores, and each local engine's share of them.

Two engines that both believe they own all cores spend their time waiting for each other's threads
(two threads each on two cores already collapse), so every engine gets cores of its own and is told
how many threads that makes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.cgroups import MEMBERSHIP, ROOT, own_groups

_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class UsableCores(msgspec.Struct, frozen=True):
    """The cores that this process may use."""

    ids: tuple[int, ...]
    pinnable: bool
    """False when a time quota, not a mask, sets the number: then the ids only count, and pinning to them
    would press every container of the machine onto the same first cores."""


def share_cores(available: Sequence[int], num_engines: int, reserved: int) -> list[list[int]]:
    """Each engine's cores: neighbours, and as many for one as for another (at most one apart).

    `reserved` cores at the front stay free for the frontend and the rest, as long as every engine still
    has one of its own. With more engines than cores, they share in turn, one core each.
    """
    if not available:
        raise ConfigError("there is no core to share", remedy="allow this process at least one core")
    if num_engines >= len(available):
        return [[available[engine % len(available)]] for engine in range(num_engines)]
    if num_engines <= 0:
        return []
    free = available[min(max(reserved, 0), len(available) - num_engines) :]
    each, extra = divmod(len(free), num_engines)
    shares: list[list[int]] = []
    begin = 0
    for engine in range(num_engines):
        end = begin + each + (1 if engine < extra else 0)
        shares.append(list(free[begin:end]))
        begin = end
    return shares


def thread_env(cores: Sequence[int]) -> dict[str, str]:
    """The environment that keeps a child's thread pools within its share."""
    env = dict.fromkeys(_THREAD_COUNTS, str(max(1, len(cores))))
    # Engines take tokens, so a pool of tokenizer threads would only compete with the compute threads.
    return {**env, "TOKENIZERS_PARALLELISM": "false"}


def usable_cores(cgroup_root: Path = ROOT, membership: Path = MEMBERSHIP) -> UsableCores:
    """Ask the system: the affinity mask, cut to the cgroup's cpu quota where one is set."""
    # macOS has no affinity mask: there all cores count.
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    ids = tuple(sorted(mask))
    quota = cpu_quota(cgroup_root, membership)
    if quota is None or quota >= len(ids):
        return UsableCores(ids, pinnable=hasattr(os, "sched_setaffinity"))
    return UsableCores(ids[: max(1, int(quota))], pinnable=False)


def cpu_quota(cgroup_root: Path, membership: Path) -> float | None:
    """The smallest cgroup v2 quota, in cores, from this process's group up to the root; None without one."""
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
