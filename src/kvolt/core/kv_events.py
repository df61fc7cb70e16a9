"""KV events: blocks that a worker stores and removes, published for routers; format and digest of their hashes.

Packed hashes are little-endian u64 in one bytes object, the wire format. The digest of a set of blocks is the xor of
SplitMix64's finalizer over their SequenceHashes: adding and removing a block are the same operation. A router and a
worker with the same set have the same digest. It detects lost events and bugs, not hashes chosen by an attacker.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Self, cast

import msgspec

from kvolt.core.ids import InstanceId, SequenceHash

HASH_BYTES = 8
HASHES_DTYPE = "<u8"
"""NumPy dtype of packed hashes."""

_MAX_STRUCTS = 256


@lru_cache(_MAX_STRUCTS)
def _struct_of(number: int) -> struct.Struct:
    return struct.Struct(f"<{number}Q")


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Raises struct.error for a value outside u64."""
    return _struct_of(len(hashes)).pack(*hashes)


def unpack_hashes(data: bytes) -> tuple[SequenceHash, ...]:
    """`data` must be a whole number of hashes."""
    return cast("tuple[SequenceHash, ...]", _struct_of(num_packed_hashes(data)).unpack(data))


def num_packed_hashes(data: bytes) -> int:
    return len(data) // HASH_BYTES


def check_packed_hashes(data: bytes) -> None:
    """Raise ValueError unless `data` is a whole number of hashes."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not a multiple of {HASH_BYTES}")


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


class Tier(StrEnum):
    """Storage tier of a block, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"
    PEER = "peer"


TIER_LEVEL: dict[Tier, int] = {tier: level for level, tier in enumerate(Tier)}
"""Tiers as array indices; 0 is the fastest."""


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="stored"):
    """A chain of stored blocks, each the child of the previous one."""

    hashes: bytes
    """SequenceHashes packed."""
    parent: SequenceHash | None = None
    start_position: int | None = None
    """Index of the first block in its sequence, if the engine knows it."""
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        check_packed_hashes(self.hashes)

    @classmethod
    def from_hashes(
        cls,
        hashes: Sequence[int],
        parent: SequenceHash | None = None,
        start_position: int | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> Self:
        return cls(pack_hashes(hashes), parent, start_position, tier)

    @property
    def num_blocks(self) -> int:
        return num_packed_hashes(self.hashes)

    @property
    def sequence_hashes(self) -> tuple[SequenceHash, ...]:
        return unpack_hashes(self.hashes)


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, tag="removed"):
    """Removed blocks, in any order."""

    hashes: bytes
    """SequenceHashes packed."""
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        check_packed_hashes(self.hashes)

    @classmethod
    def from_hashes(cls, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> Self:
        return cls(pack_hashes(hashes), tier)

    @property
    def num_blocks(self) -> int:
        return num_packed_hashes(self.hashes)

    @property
    def sequence_hashes(self) -> tuple[SequenceHash, ...]:
        return unpack_hashes(self.hashes)


class Cleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="cleared"):
    """All blocks of this worker, rank and tier (None: all tiers) are removed."""

    tier: Tier | None = None


KvChange = Stored | Removed | Cleared


class KvEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of one rank. Ids increase by one within an epoch; a new epoch starts with no blocks."""

    event_id: int
    epoch: int
    change: KvChange
    dp_rank: int = 0


class KvDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Number and digest of the blocks of one rank and tier; see the module."""

    num_blocks: int
    digest: int
    dp_rank: int = 0
    tier: Tier = Tier.DEVICE


class KvEventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of one engine step of one instance."""

    events: tuple[KvEvent, ...]
    instance: InstanceId | None = None
    digests: tuple[KvDigest, ...] = ()
    """Sent periodically: state of these ranks after the events, against which a subscriber checks its index."""
