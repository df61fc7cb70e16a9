"""Search for markers in text that may end in the middle of one."""

from __future__ import annotations

from collections.abc import Sequence


def first_marker(text: str, start: int, markers: Sequence[str]) -> tuple[int, str] | None:
    """Position and value of the earliest marker. Markers do not overlap."""
    earliest = None
    end = len(text)
    for marker in markers:
        at = text.find(marker, start, end)
        if at >= 0:
            earliest, end = (at, marker), at
    return earliest


def partial_marker_length(text: str, start: int, markers: Sequence[str]) -> int:
    """Length of the text's end, after `start`, that may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text) - start), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def may_become(text: str, start: int, marker: str) -> bool:
    """Whether the text from `start` is the beginning of the marker."""
    return len(text) - start < len(marker) and marker.startswith(text[start:])
