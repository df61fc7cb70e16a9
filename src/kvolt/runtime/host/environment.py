"""Environment variables of this process, for libraries that have no other configuration, and its cache directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def set_default(name: str, value: str) -> str:
    """Set a variable unless the user has set it; return its value."""
    return os.environ.setdefault(name, value)


def environment(name: str) -> str | None:
    """Value of a variable; None if it is unset or empty."""
    return os.environ.get(name) or None


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Directory of this user for downloaded files: `KVOLT_HOME`, or `kvolt` in the XDG cache directory.

    It may not exist yet, and its contents can be deleted at any time.
    """
    environ = os.environ if environ is None else environ
    if environ.get("KVOLT_HOME"):
        return Path(environ["KVOLT_HOME"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvolt"
