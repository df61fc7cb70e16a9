"""Control groups of this process, whose limits apply to it in a container (cgroup v2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def own_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Directories of the process's groups, innermost first.

    In a container the outer groups are not visible, and any file may be missing.
    """
    group = _own_group(membership)
    if group is None:
        return
    own_folder = root / group.lstrip("/")
    for folder in (own_folder, *own_folder.parents):
        yield folder
        if folder == root:
            break


def _own_group(membership: Path) -> str | None:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
