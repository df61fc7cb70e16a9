"""Messages by which a router recovers missed KV events through a worker's control endpoint.

The router first requests a replay of the missed events, which the worker keeps for a while, and if they are no longer
available a snapshot of all blocks. Both responses are split into parts of bounded size; the first part has the event
id that they correspond to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import HASHES_DTYPE, KvDigest, Tier

PART_BYTES = 512 * 1024
"""Approximate size of one part of a response."""


class KvEventsSince(msgspec.Struct, frozen=True, tag="kv_events_since"):
    """Request the events from this id on."""

    epoch: int
    event_id: int


class KvContents(msgspec.Struct, frozen=True, tag="kv_contents"):
    """Request a snapshot of all blocks."""


KvRecoveryRequest = KvEventsSince | KvContents


class KvReplay(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_replay"):
    """One part of the response to KvEventsSince."""

    instance: InstanceId
    epoch: int
    next_id: int
    """Id of the next event that the worker will publish."""
    batches: tuple[bytes, ...] = ()
    """Encoded KvEventBatches in order, starting with the one that contains the requested event."""
    is_unavailable: bool = False
    """The events are of another epoch or no longer kept; `batches` is empty."""
    digests: tuple[KvDigest, ...] = ()
    """State at `next_id`; empty if the worker does not compute digests."""


class KvSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_snapshot"):
    """First part of the response to KvContents: the event id of the snapshot, and the digests of its contents.

    A rank and tier without a digest holds no blocks.
    """

    instance: InstanceId
    epoch: int
    next_id: int
    digests: tuple[KvDigest, ...] = ()


class KvSnapshotPart(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_snapshot_part"):
    """Part of the blocks of one rank and tier, packed."""

    hashes: bytes
    dp_rank: int = 0
    tier: Tier = Tier.DEVICE


KvRecoveryResponse = KvReplay | KvSnapshot | KvSnapshotPart


def pack_hash_parts(hashes: Iterable[int]) -> Iterator[bytes]:
    """Pack hashes into parts of at most PART_BYTES."""
    import numpy as np

    packed = np.fromiter(hashes, dtype=HASHES_DTYPE).tobytes()
    for start in range(0, len(packed), PART_BYTES):
        yield packed[start : start + PART_BYTES]


def split_batches(batches: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Group batches into parts of about PART_BYTES; yields at least one group, which may be empty."""
    group: list[bytes] = []
    num_bytes = 0
    for batch in batches:
        if group and num_bytes + len(batch) > PART_BYTES:
            yield tuple(group)
            group, num_bytes = [], 0
        group.append(batch)
        num_bytes += len(batch)
    yield tuple(group)
