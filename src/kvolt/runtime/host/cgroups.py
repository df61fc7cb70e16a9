"""The control groups of this process, its own first: a container's limits are written there (cgroup v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def own_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Their folders. Inside a container the outer ones are not visible, and files may be missing in any."""
    group = _own_group(membership)
    if group is None:
        return
    place = root / group.lstrip("/")
    for folder in (place, *place.parents):
        yield folder
        if folder == root:
            break


def _own_group(membership: Path) -> str | None:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
