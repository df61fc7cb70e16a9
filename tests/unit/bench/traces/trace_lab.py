"""What tests of traces share: records by few words, traces that are here, and slow but plain truths."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from kvolt.bench.traces import find_public, read_trace, small_trace
from kvolt.bench.traces.sources import FileState
from kvolt.core.trace import TraceRecord


def record(
    ids: Sequence[int] = (), length: int | None = None, block_size: int = 4, at: float = 0.0
) -> TraceRecord:
    """A prompt of these blocks, all full unless a length is given."""
    whole = max(1, len(ids) * block_size)
    return TraceRecord(
        timestamp=at,
        input_length=whole if length is None else length,
        output_length=1,
        hash_ids=tuple(ids),
        block_size=block_size,
    )


@st.composite
def prompts(draw: st.DrawFn, block_size: int) -> TraceRecord:
    """Few different ids, so that prompts share beginnings often; the last block is often partial."""
    ids = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    missing = draw(st.integers(0, block_size - 1))
    return record(ids, len(ids) * block_size - missing, block_size)


def shared_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are equal."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def shared_tokens(one: TraceRecord, other: TraceRecord) -> int:
    """How many leading tokens two prompts share by their ids and lengths."""
    blocks = shared_blocks(one.hash_ids, other.hash_ids)
    return min(blocks * one.block_size, one.input_length, other.input_length)


def lru_hits(records: Iterable[TraceRecord], capacity: int | None) -> int:
    """By a cache that is really kept: blocks named by all ids up to them, a prompt's first block used last."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for each in records:
        names = [each.hash_ids[: place + 1] for place in range(len(each.hash_ids))]
        for name in names:
            if name not in cache:
                break
            hits += 1
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@dataclass(frozen=True)
class Present:
    """A trace that this machine has; public ones with how many requests they have."""

    name: str
    path: Path | None
    requests: int

    def records(self) -> list[TraceRecord]:
        return small_trace() if self.path is None else list(read_trace(self.path))


def present_traces() -> list[Present]:
    """The public traces in the folder that KVOLT_TRACES names; the project's own one always."""
    own = Present("small", None, 300)
    folder = os.environ.get("KVOLT_TRACES")
    if not folder:
        return [own]
    found = [each for each in find_public(folder) if each.state is FileState.SAME and each.path is not None]
    return [own, *(Present(each.trace.name, Path(each.path or ""), each.trace.requests) for each in found)]
