"""How deep a caller's free-form JSON may nest: code that walks it later (templates, encoders) recurses."""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest

MAX_DEPTH = 64


def nests_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Level by level instead of recursing, so that no depth is too deep for the check itself."""
    level = [value]
    for _ in range(max_depth + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return False
        level = below
    return True


def check_nesting(value: Any, param: str, max_depth: int = MAX_DEPTH) -> None:
    if nests_deeper(value, max_depth):
        raise InvalidRequest(f"{param} nests deeper than {max_depth} levels", param=param)
