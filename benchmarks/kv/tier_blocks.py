"""Blocks of KV tiers with made-up names."""

from __future__ import annotations

import hashlib

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.tiers.slot_table import TierBlock


def tier_blocks(name: str, count: int, chain: int = 0) -> list[TierBlock]:
    """Blocks in chains of `chain` blocks (0: one chain), each after the one before, as those of conversations."""
    blocks: list[TierBlock] = []
    for number in range(count):
        key = BlockKey(hashlib.blake2b(f"{name}/{number}".encode(), digest_size=16).digest())
        position = number % chain if chain else number
        parent = blocks[-1] if position else None
        sequence_hash = SequenceHash(int.from_bytes(key[:8], "little"))
        above, above_hash = (parent.key, parent.sequence_hash) if parent else (None, None)
        blocks.append(TierBlock(key, sequence_hash, above, above_hash, position))
    return blocks
