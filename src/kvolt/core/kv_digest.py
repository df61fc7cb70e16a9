"""A digest of a set of blocks that does not depend on their order and is kept up as blocks come and go.

The xor of every SequenceHash after SplitMix64's finalizer. Adding a block and taking it away are the same operation,
so a set's digest follows each change in one step; two sides that hold the same set have the same digest, however they
got there. It finds lost events and defects. It is no proof against someone who chooses hashes to fool it.
"""

from __future__ import annotations

from collections.abc import Iterable

EMPTY_DIGEST = 0

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def mix(block_hash: int) -> int:
    """SplitMix64's finalizer: every bit of the result depends on every bit of the hash."""
    mixed = (block_hash + _STEP) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)


def digest_of(hashes: Iterable[int]) -> int:
    """Of these blocks, each named once. `digest ^ digest_of(some)` is the digest with or without them."""
    digest = EMPTY_DIGEST
    for block_hash in hashes:
        digest ^= mix(block_hash)
    return digest
