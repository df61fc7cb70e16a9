"""Splits the changes of a tier into KV events of bounded size: a tier may change by millions of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored

_TOLD_AT_ONCE = 1 << 15
"""Blocks in one event."""


def in_parts(change: KvChange) -> Iterator[KvChange]:
    """What is too much for one event is several."""
    if isinstance(change, Cleared) or change.num_blocks <= _TOLD_AT_ONCE:
        yield change
        return
    hashes, position = change.sequence_hashes, 0
    parent = change.parent if isinstance(change, Stored) else None
    for start in range(0, len(hashes), _TOLD_AT_ONCE):
        part = hashes[start : start + _TOLD_AT_ONCE]
        if isinstance(change, Removed):
            yield Removed.of(part, change.tier)
        else:
            position = (change.start_position or 0) + start
            yield Stored.of(part, parent, position, change.tier)
            parent = part[-1]
