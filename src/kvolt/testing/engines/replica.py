"""Replica of an engine's blocks from its KV events; checks every event against the contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.core.request import Request


class Replica:
    """Blocks of each tier. `apply` raises AssertionError for an invalid event."""

    def __init__(self, changes: Iterable[KvChange] = ()) -> None:
        self.num_removed = 0
        self.num_cleared = 0
        self._tiers: dict[Tier, set[SequenceHash]] = {}
        for change in changes:
            self.apply(change)

    @property
    def blocks(self) -> set[SequenceHash]:
        """Blocks in any tier."""
        return set().union(*self._tiers.values())

    def apply(self, change: KvChange) -> None:
        match change:
            case Stored():
                self._store(change)
            case Removed():
                held = self._tiers.get(change.tier, set())
                for block in change.sequence_hashes:
                    assert block in held, f"block {block:x} was removed but not stored before"
                    held.remove(block)
                    self.num_removed += 1
            case Cleared():
                self.num_cleared += 1
                for tier in [change.tier] if change.tier is not None else list(self._tiers):
                    self._tiers.pop(tier, None)

    def _store(self, change: Stored) -> None:
        assert change.num_blocks, "empty Stored event"
        assert change.parent is None or change.parent in self.blocks, f"stored before its parent: {change}"
        held = self._tiers.setdefault(change.tier, set())
        for block in change.sequence_hashes:
            assert block not in held, f"block {block:x} was stored twice"
            held.add(block)

    def num_leading(self, blocks: Sequence[SequenceHash]) -> int:
        """Number of leading blocks that are held."""
        held = self.blocks
        return next((index for index, block in enumerate(blocks) if block not in held), len(blocks))


def block_hashes(request: Request, block_size: int, output: Sequence[int] = ()) -> list[SequenceHash]:
    """Hashes of the full blocks of a request and its output."""
    hasher = SequenceHasher(block_size, request_seed(request.lora, request.salt), request.media)
    hasher.extend([*request.token_ids, *output])
    return hasher.sequence
