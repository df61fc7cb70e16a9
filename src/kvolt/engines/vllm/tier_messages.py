"""What the two halves of the tier connector say to each other, by way of vLLM's steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier


class Move(NamedTuple):
    """A block of vLLM's, one of a request's, on its way."""

    key: BlockKey
    parent: BlockKey | None
    position: int
    number: int
    """In vLLM's memory."""


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, with a step."""

    loads: dict[str, list[Move]] = field(default_factory=dict)
    """Of requests, what is to be brought before they go on."""
    stores: dict[str, list[Move]] = field(default_factory=dict)
    """Of requests, blocks that the step completes."""
    awaited: set[str] = field(default_factory=set)
    """Requests that are over, and whose blocks are nobody else's until they are copied."""
    clear: bool = False
    """Forget all that is kept, before anything else."""


@dataclass
class Found(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Of a worker, once: what its tiers had when it began."""

    told: Told | None


@dataclass
class Told(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of the workers: what has come to which of their tiers, and gone; how many of them say so."""

    stored: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)
    removed: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)

    def aggregate(self, other: Any) -> Told:
        return Told(self.stored + other.stored, self.removed + other.removed)


def key_of(name: bytes, identity: bytes) -> BlockKey:
    """`name`: as vLLM hashes a block: all before it, the adapter and the salt are in it. `identity`: what else makes
    its bytes what they are."""
    return BlockKey(blake2b(name, digest_size=16, key=identity[:64]).digest())


def hash_of(key: BlockKey) -> SequenceHash:
    """What tiers tell of a block by."""
    return SequenceHash(int.from_bytes(key[:8], "little"))
