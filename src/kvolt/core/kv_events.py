"""KV events: blocks that a worker stores and removes, published for routers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import msgspec

from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.packed_hashes import check_packed_hashes, num_packed_hashes, pack_hashes, unpack_hashes


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
    """SequenceHashes in the format of `packed_hashes`."""
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
    """SequenceHashes in the format of `packed_hashes`."""
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
    """Number and digest of the blocks of one rank and tier; see `kv_digest`."""

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
