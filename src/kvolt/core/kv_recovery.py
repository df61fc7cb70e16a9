"""What a router asks a worker whose KV events it missed, and the answers. Asked at the worker's control endpoint.

First the events themselves, which the worker keeps for a while; if they are gone, all that it holds. Both answers
come in parts of a bounded size, the first of which says at which event they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvDigest, Tier
from kvolt.core.packed_hashes import HASHES_DTYPE

PART_BYTES = 512 * 1024
"""About the size of a part of an answer: large enough to be few, small enough to be nobody's burden."""


class KvEventsSince(msgspec.Struct, frozen=True, tag="kv_events_since"):
    """Everything from this event on."""

    epoch: int
    event_id: int


class KvContents(msgspec.Struct, frozen=True, tag="kv_contents"):
    """All blocks that are held now."""


KvQuestion = KvEventsSince | KvContents


class KvReplay(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_replay"):
    """A part of the answer to KvEventsSince."""

    instance: InstanceId
    epoch: int
    next_id: int
    """Of the event that comes after all that was told up to now."""
    batches: tuple[bytes, ...] = ()
    """Each an encoded KvEventBatch, in order, beginning with the one that has the event asked for."""
    is_gone: bool = False
    """The events are of another epoch or too long ago. Then there are no batches."""
    digests: tuple[KvDigest, ...] = ()
    """What is held at `next_id`; none where nobody keeps count."""


class KvSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_snapshot"):
    """The first part of the answer to KvContents: when it was taken, and what the parts that follow come to.

    A rank and tier that is not among the digests holds nothing.
    """

    instance: InstanceId
    epoch: int
    next_id: int
    digests: tuple[KvDigest, ...] = ()


class KvSnapshotPart(msgspec.Struct, frozen=True, omit_defaults=True, tag="kv_snapshot_part"):
    """Some of the blocks of one rank and tier, as `packed_hashes` has them."""

    hashes: bytes
    dp_rank: int = 0
    tier: Tier = Tier.DEVICE


KvAnswer = KvReplay | KvSnapshot | KvSnapshotPart


def pack_hashes(hashes: Iterable[int]) -> Iterator[bytes]:
    """In pieces of PART_BYTES at most."""
    import numpy as np

    packed = np.fromiter(hashes, dtype=HASHES_DTYPE).tobytes()
    for start in range(0, len(packed), PART_BYTES):
        yield packed[start : start + PART_BYTES]


def split_batches(batches: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
    """Batches in groups of about PART_BYTES; at least one group, which may be empty."""
    group: list[bytes] = []
    num_bytes = 0
    for batch in batches:
        if group and num_bytes + len(batch) > PART_BYTES:
            yield tuple(group)
            group, num_bytes = [], 0
        group.append(batch)
        num_bytes += len(batch)
    yield tuple(group)
