"""Private directories of a user: created without access for other users, and trusted only if no other user can write.

The default path is predictable, so another user may have created it first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(path: Path) -> None:
    """Create the directory and missing parents, accessible to the owner only. Raises OSError."""
    for folder in (*reversed(path.parents), path):  # `mkdir(parents=True)` sets the mode of the last one only
        folder.mkdir(mode=0o700, exist_ok=True)


def untrusted_reason(path: Path) -> str | None:
    """Why the contents of a directory may be from another user; None if they are not. Raises OSError."""
    info = path.lstat()  # not stat: the target of a link may change
    if not stat.S_ISDIR(info.st_mode):
        return "is not a directory"
    if info.st_uid != os.geteuid():
        return "belongs to another user"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is writable by other users"
    return None
