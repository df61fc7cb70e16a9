"""The environment of this process and its children, for libraries that can be told in no other way."""

from __future__ import annotations

import os


def set_default(name: str, value: str) -> str:
    """What a user has set stays; what is set now."""
    return os.environ.setdefault(name, value)


def environment(name: str) -> str | None:
    """What the process was started with, or has been told since."""
    return os.environ.get(name) or None
