"""What the two halves of the tier connector say to each other, by way of vLLM's steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
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
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks may be others' from this step on."""
    timed: int | None = None
    """A number for the step, if somebody wants to know how long it takes."""
    clear: bool = False
    """Forget all that is kept, before anything else."""


@dataclass
class Found(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Of a worker, once: what its tiers had when it began."""

    told: Told | None


@dataclass(frozen=True)
class TierFigures:
    """Of one tier, since the workers began."""

    num_stored: int = 0
    stored_s: float = 0.0
    num_loaded: int = 0
    loaded_s: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """Blocks by reason."""
    block_s: float = 0.0
    """To bring one, lately."""
    num_slots: int | None = None
    block_bytes: int = 0
    num_dropped: int = 0
    """Of the host's, those that left it before they were written below."""

    def most(self, other: TierFigures) -> TierFigures:
        """Of two workers: each has a piece of every block, and the slower one is waited for."""
        numbers = {
            name: max(getattr(self, name), getattr(other, name))
            for name in ("num_stored", "stored_s", "num_loaded", "loaded_s", "block_s", "num_dropped")
        }
        failures = Counter(self.failures) | Counter(other.failures)
        return replace(self, **numbers, failures=dict(failures))


@dataclass
class Told(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Of the workers: what has come to which of their tiers, and gone; how many of them say so."""

    stored: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)
    removed: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)
    step_s: dict[int, float] = field(default_factory=dict)
    """How long steps took, by their numbers."""
    figures: dict[Tier, TierFigures] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Told:
        step_s, figures = dict(self.step_s), dict(self.figures)
        for number, took_s in other.step_s.items():
            step_s[number] = max(step_s.get(number, 0.0), took_s)
        for tier, theirs in other.figures.items():
            figures[tier] = theirs.most(figures[tier]) if tier in figures else theirs
        return Told(self.stored + other.stored, self.removed + other.removed, step_s, figures)


def key_of(name: bytes, identity: bytes) -> BlockKey:
    """`name`: as vLLM hashes a block: all before it, the adapter and the salt are in it. `identity`: what else makes
    its bytes what they are."""
    return BlockKey(blake2b(name, digest_size=16, key=identity[:64]).digest())


def hash_of(key: BlockKey) -> SequenceHash:
    """What tiers tell of a block by."""
    return SequenceHash(int.from_bytes(key[:8], "little"))
