"""KV events: which blocks a worker holds, told to whoever routes to it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvolt.core.ids import InstanceId, LocalBlockHash, SequenceHash


class Tier(StrEnum):
    """Where a block lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    OBJECT = "object"
    PEER = "peer"


class Stored(msgspec.Struct, frozen=True, omit_defaults=True, tag="stored"):
    """A run of blocks, each the child of the one before."""

    sequence_hashes: tuple[SequenceHash, ...]
    local_hashes: tuple[LocalBlockHash, ...]
    parent: SequenceHash | None = None
    start_position: int | None = None
    """Index of the first block in its sequence, where the engine knows it."""
    tier: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) != len(self.local_hashes):
            raise ValueError("a stored block has one hash of each kind")


class Removed(msgspec.Struct, frozen=True, omit_defaults=True, tag="removed"):
    sequence_hashes: tuple[SequenceHash, ...]
    tier: Tier = Tier.DEVICE


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


class KvEventBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one step of one instance."""

    events: tuple[KvEvent, ...]
    instance: InstanceId | None = None
