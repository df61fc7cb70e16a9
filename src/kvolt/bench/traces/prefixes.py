"""Hash ids for prompts of segments: equal prefixes give equal ids.

A prompt is a sequence of segments, each with a content key and a length in tokens: a chat turn, or a block of another
size. A block's id is a chained hash of the keys up to the segment in which the block ends:

    segments   |----- a -----|--- b ---|------- c ------|
    blocks     |  a  |  ab   |   ab  |   abc   |  abc'  |      ' partial: its length is hashed too

Two prompts share a block if all segments up to its end are equal. This is conservative: different segments may have
equal first tokens, which a trace does not show.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest as xxh3

from kvolt.core.trace import TraceRecord

Segment = tuple[int, int]
"""Key (64 bits) and length in tokens."""

ROOT = 0
"""Chain value before the first segment."""
_PARTIAL_SEED = 1
_pack_link = struct.Struct("<QQ").pack


def link(chain: int, key: int) -> int:
    """Chain value after one more segment."""
    return xxh3(_pack_link(chain, key))


def block_ids(segments: Iterable[Segment], block_size: int) -> tuple[int, ...]:
    """One id per block of `block_size` tokens; the last block may be partial."""
    ids: list[int] = []
    chain, end, count = ROOT, 0, 0
    for key, length in segments:
        chain = xxh3(_pack_link(chain, key))
        end += length
        if end // block_size > count:
            # One hash for all blocks that end in this segment; their positions distinguish them.
            base, first, count = _base(chain), count, end // block_size
            ids.extend(range(base + first, base + count))
    rest = end - count * block_size
    if rest:
        ids.append(_base(xxh3(_pack_link(chain, rest), seed=_PARTIAL_SEED)) + count)
    return tuple(ids)


def _base(chain: int) -> int:
    """62 bits, so that the sum with a position is a positive signed 64-bit number."""
    return chain >> 2


def segments_of(record: TraceRecord) -> Iterator[Segment]:
    """Segments of a record's blocks."""
    left = record.input_length
    for key in record.hash_ids:
        yield key, min(record.block_size, left)
        left -= record.block_size


def reblock(records: Iterable[TraceRecord], block_size: int) -> Iterator[TraceRecord]:
    """Rehash prompts to another block size; the sizes need not divide each other."""
    for record in records:
        if record.block_size == block_size:
            yield record
        else:
            ids = block_ids(segments_of(record), block_size) if record.hash_ids else ()
            yield replace(record, hash_ids=ids, block_size=block_size)
