"""Incremental, order-independent digest of a set of blocks.

The xor of SplitMix64's finalizer over all SequenceHashes: adding and removing a block are the same operation. A router
and a worker with the same set have the same digest. It detects lost events and bugs, not hashes chosen by an attacker.
"""

from __future__ import annotations

from collections.abc import Iterable

EMPTY_DIGEST = 0

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix_hash(block_hash: int) -> int:
    """Apply SplitMix64's finalizer: every output bit depends on every input bit."""
    mixed = (block_hash + _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)


def digest_of(hashes: Iterable[int]) -> int:
    """Digest of distinct hashes. `digest ^ digest_of(hashes)` adds or removes them."""
    digest = EMPTY_DIGEST
    for block_hash in hashes:
        digest ^= mix_hash(block_hash)
    return digest
