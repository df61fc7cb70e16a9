"""Finding markers in text that may end in the middle of one."""

from __future__ import annotations

from collections.abc import Sequence


def first_marker(text: str, start: int, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the earliest of the markers stands, and which it is. They do not overlap."""
    found = None
    end = len(text)
    for marker in markers:
        at = text.find(marker, start, end)
        if at >= 0:
            found, end = (at, marker), at
    return found


def begun_marker(text: str, start: int, markers: Sequence[str]) -> int:
    """How many characters at the end of text, from start on, may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text) - start), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def may_become(text: str, start: int, marker: str) -> bool:
    """The text from start on is the beginning of the marker, and more of it may come."""
    return len(text) - start < len(marker) and marker.startswith(text[start:])
