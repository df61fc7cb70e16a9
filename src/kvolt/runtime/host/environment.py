"""Environment variables of this process, for libraries that have no other configuration."""

from __future__ import annotations

import os


def set_default(name: str, value: str) -> str:
    """Set a variable unless the user has set it; return its value."""
    return os.environ.setdefault(name, value)


def environment(name: str) -> str | None:
    """Value of a variable; None if it is unset or empty."""
    return os.environ.get(name) or None
