"""Splits the changes of a tier into KV events of bounded size: a tier may change by millions of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored

_MAX_EVENT_BLOCKS = 1 << 15
"""Blocks in one event."""


def split_change(change: KvChange) -> Iterator[KvChange]:
    """Split a change that is too large for one event."""
    if isinstance(change, Cleared) or change.num_blocks <= _MAX_EVENT_BLOCKS:
        yield change
        return
    hashes, position = change.sequence_hashes, 0
    parent = change.parent if isinstance(change, Stored) else None
    for start in range(0, len(hashes), _MAX_EVENT_BLOCKS):
        part = hashes[start : start + _MAX_EVENT_BLOCKS]
        if isinstance(change, Removed):
            yield Removed.from_hashes(part, change.tier)
        else:
            position = (change.start_position or 0) + start
            yield Stored.from_hashes(part, parent, position, change.tier)
            parent = part[-1]
