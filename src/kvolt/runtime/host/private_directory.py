"""Directories of one user: made so that no other can enter, and trusted only when no other can write.

The default place is under a name that anybody on the machine can foresee, so somebody else may have made
it first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """Make the directory and every missing one above it, each for its owner alone. Raises OSError."""
    for place in (*reversed(path.parents), path):  # `mkdir(parents=True)` gives the mode to the last only
        place.mkdir(mode=0o700, exist_ok=True)


def distrust(path: Path) -> str | None:
    """Why what lies in this directory may be somebody else's; None when it is ours alone. Raises OSError."""
    found = path.lstat()  # a link is followed by nobody: where it leads may change
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return None
