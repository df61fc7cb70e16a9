"""KV events: which blocks a worker holds, told to whoever routes to it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import msgspec

from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.packed_hashes import check_packed, num_packed, packed, unpacked


class Tier(StrEnum):
    """Where a block lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"
    PEER = "peer"


TIER_LEVEL: dict[Tier, int] = {tier: level for level, tier in enumerate(Tier)}
"""The tiers as numbers, for who keeps arrays over them: 0 is the fastest."""


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="stored"):
    """A run of blocks, each the child of the one before."""

    hashes: bytes
    """Their SequenceHashes as `packed_hashes` has them: most who handle them never look at one."""
    parent: SequenceHash | None = None
    start_position: int | None = None
    """Index of the first block in its sequence, where the engine knows it."""
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        check_packed(self.hashes)

    @classmethod
    def of(
        cls,
        hashes: Sequence[int],
        parent: SequenceHash | None = None,
        start_position: int | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> Self:
        return cls(packed(hashes), parent, start_position, tier)

    @property
    def num_blocks(self) -> int:
        return num_packed(self.hashes)

    @property
    def sequence_hashes(self) -> tuple[SequenceHash, ...]:
        return unpacked(self.hashes)


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, tag="removed"):
    """Blocks in any order."""

    hashes: bytes
    """As in Stored."""
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        check_packed(self.hashes)

    @classmethod
    def of(cls, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> Self:
        return cls(packed(hashes), tier)

    @property
    def num_blocks(self) -> int:
        return num_packed(self.hashes)

    @property
    def sequence_hashes(self) -> tuple[SequenceHash, ...]:
        return unpacked(self.hashes)


class Cleared(msgspec.Struct, frozen=True, omit_defaults=True, tag="cleared"):
    """Every block of this worker, rank and tier (all tiers when None) is gone."""

    tier: Tier | None = None


KvChange = Stored | Removed | Cleared


class KvEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of one rank. Ids count up by one within an epoch; a new epoch starts from nothing."""

    event_id: int
    epoch: int
    change: KvChange
    dp_rank: int = 0


class KvDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank holds in one tier, in two numbers: see `kv_digest`."""

    num_blocks: int
    digest: int
    dp_rank: int = 0
    tier: Tier = Tier.DEVICE


class KvEventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one step of one instance."""

    events: tuple[KvEvent, ...]
    instance: InstanceId | None = None
    digests: tuple[KvDigest, ...] = ()
    """Now and then: what the ranks of these events hold after them, so that who follows can see that it is right."""
