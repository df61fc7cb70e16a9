"""Where this user's fetched files are kept from one start to the next.

Nothing in it is the only copy: it may be removed at any time, and is fetched again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """`KVOLT_HOME`, or `kvolt` in the XDG cache directory. It need not exist."""
    environ = os.environ if environ is None else environ
    if environ.get("KVOLT_HOME"):
        return Path(environ["KVOLT_HOME"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvolt"
