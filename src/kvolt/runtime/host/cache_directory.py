"""Cache directory of this user for downloaded files. Its contents can be deleted at any time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """`KVOLT_HOME`, or `kvolt` in the XDG cache directory. It may not exist yet."""
    environ = os.environ if environ is None else environ
    if environ.get("KVOLT_HOME"):
        return Path(environ["KVOLT_HOME"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvolt"
