"""What a slab's blocks hold, and which bytes of one rank's block belong where in another's. Pure.

Ranks of a tensor-parallel model share its KV heads: each has the heads of its share, next to each other. With more
ranks than heads a head is on several ranks, which are replicas of each other.

    8 heads    degree 1  [0 1 2 3 4 5 6 7]              2 heads   degree 4  [0] [0] [1] [1]
               degree 2  [0 1 2 3] [4 5 6 7]                      degree 2  [0]     [1]
               degree 4  [0 1] [2 3] [4 5] [6 7]

Where two sides share heads differently, a block is moved as equal pieces: one for every run of the axes that stand
before the heads. Nothing but the order of axes, which a layout's name tells, says where they lie. Knows no memory and
no peer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.errors import Fault, KvoltError
from kvolt.core.kv_block import KvLayout

Offsets = npt.NDArray[np.int64]

_AXES = frozenset(("layer", "kv", "head", "token"))
_CHECKSUM_WORD_BYTES = 8
"""A checksum over several pieces reads whole words of each."""


class IncompatibleLayout(KvoltError):
    """Blocks of two slabs do not mean the same. Its message is `why_incompatible`'s."""

    code = "incompatible_layout"
    fault = Fault.OPERATOR


class MissingHeads(KvoltError):
    """The source ranks that are there do not have all heads. Fields: heads (text: "4-7"), num_sources."""

    code = "missing_heads"
    fault = Fault.OPERATOR
    retryable = True
    """A rank that is starting will be there."""


class SlabLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank's slab. `of_rank` makes one from the whole model's layout."""

    block: KvLayout
    """Of this rank's blocks: its number of heads and of bytes are the rank's."""
    total_kv_heads: int
    """Of the model. The rank's own do not tell, where heads are on several ranks."""
    tp_degree: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        total, degree, rank = self.total_kv_heads, self.tp_degree, self.tp_rank
        if total < 1 or degree < 1 or not 0 <= rank < degree:
            raise ValueError(f"rank {rank} of {degree} over {total} KV heads is no layout")
        if total % degree and degree % total:
            raise ValueError(
                f"{total} KV heads cannot be shared by {degree} ranks: choose a tensor parallelism that divides "
                "the number of heads, or a multiple of it"
            )
        if self.block.num_kv_heads != (share := max(total // degree, 1)):
            raise ValueError(
                f"a rank of {degree} has {share} of {total} KV heads, and not {self.block.num_kv_heads}"
            )

    @classmethod
    def of_rank(cls, model: KvLayout, degree: int = 1, rank: int = 0) -> SlabLayout:
        """`model`: what an engine that is one rank would have."""
        total = model.num_kv_heads
        share = max(total // max(degree, 1), 1)
        block = msgspec.structs.replace(
            model, num_kv_heads=share, block_bytes=model.block_bytes * share // total
        )
        return cls(block=block, total_kv_heads=total, tp_degree=degree, tp_rank=rank)

    @property
    def num_shares(self) -> int:
        """Ranks that differ from each other."""
        return min(self.tp_degree, self.total_kv_heads)

    @property
    def heads(self) -> range:
        """Which of the model's heads this rank has."""
        first = self.tp_rank * self.total_kv_heads // self.tp_degree
        return range(first, first + self.block.num_kv_heads)


class Cut(NamedTuple):
    """Equal pieces of a source block and where they go in the destination's block, in the same order."""

    source_offsets: Offsets
    destination_offsets: Offsets
    piece_bytes: int


class RankCut(NamedTuple):
    """What one source rank gives."""

    source: SlabLayout
    cut: Cut


_MUST_BE_EQUAL = {
    "name": ("order of axes", "run the same version of the same engine on both sides"),
    "dtype": ("dtype", "start both workers with the same dtype"),
    "num_layers": ("num_layers", "serve the same model on both sides"),
    "head_dim": ("head_dim", "serve the same model on both sides"),
    "block_size": ("block_size", "start both workers with the same block size"),
}


def why_incompatible(mine: SlabLayout, theirs: SlabLayout) -> str | None:
    """Why no block can go from one to the other, with the remedy; None when it can."""
    for field, (name, remedy) in _MUST_BE_EQUAL.items():
        ours, other = getattr(mine.block, field), getattr(theirs.block, field)
        if ours != other:
            return _differ(name, ours, other, remedy)
    if mine.total_kv_heads != theirs.total_kv_heads:
        return _differ(
            "num_kv_heads", mine.total_kv_heads, theirs.total_kv_heads, "serve the same model on both sides"
        )
    fewer, more = sorted((mine.num_shares, theirs.num_shares))
    if more % fewer:
        remedy = "choose degrees of which one divides the other"
        return _differ("tensor parallelism", mine.tp_degree, theirs.tp_degree, remedy)
    if (
        mine.block.block_bytes * theirs.block.num_kv_heads
        != theirs.block.block_bytes * mine.block.num_kv_heads
    ):
        remedy = (
            "start both workers with the same KV settings: a block holds more than its values on one side"
        )
        return _differ("block_bytes", mine.block.block_bytes, theirs.block.block_bytes, remedy)
    return None if fewer == more else _why_not_cut(mine, theirs)


def _differ(name: str, mine: object, theirs: object, remedy: str) -> str:
    return f"{name} is {mine} here and {theirs} there: {remedy}"


def _why_not_cut(mine: SlabLayout, theirs: SlabLayout) -> str | None:
    """Of two that have different shares of the heads."""
    degrees = f"tensor parallelism is {mine.tp_degree} here and {theirs.tp_degree} there"
    remedy = "use the same on both sides"
    runs = _runs_before_heads(mine.block)
    if runs is None:
        return f"{degrees}, and the order of axes {mine.block.name!r} does not say where heads lie: {remedy}"
    block = mine.block
    if block.block_bytes % (block.num_layers * 2 * block.num_kv_heads * block.block_size * block.head_dim):
        return f"{degrees}, and blocks of {block.block_bytes} bytes hold more than whole values: {remedy}"
    num_heads = min(block.num_kv_heads, theirs.block.num_kv_heads)
    piece_bytes = num_heads * (block.block_bytes // (runs * block.num_kv_heads))
    if piece_bytes % _CHECKSUM_WORD_BYTES:
        return (
            f"{degrees}, and pieces of {piece_bytes} bytes have no checksum, which takes "
            f"multiples of {_CHECKSUM_WORD_BYTES}: {remedy}, or larger blocks"
        )
    return None


def _axes(block: KvLayout) -> list[str] | None:
    """The order of axes inside a block, or None where the name does not tell. The values of a head come last."""
    first, *axes = block.name.split("-")
    return axes if first == "block" and len(axes) == len(_AXES) and set(axes) == _AXES else None


def _runs_before_heads(block: KvLayout) -> int | None:
    """How many runs of heads there are in a block."""
    axes = _axes(block)
    if axes is None:
        return None
    sizes = {"layer": block.num_layers, "kv": 2, "token": block.block_size}
    return math.prod(sizes[axis] for axis in axes[: axes.index("head")])


def cut(source: SlabLayout, destination: SlabLayout) -> Cut | None:
    """Which bytes of a source rank's block go where in a destination rank's; None when they have no head in common.

    IncompatibleLayout where blocks cannot go from one to the other at all.
    """
    if (reason := why_incompatible(destination, source)) is not None:
        raise IncompatibleLayout(reason)
    first = max(source.heads.start, destination.heads.start)
    num_heads = min(source.heads.stop, destination.heads.stop) - first
    if num_heads <= 0:
        return None
    if source.heads == destination.heads:
        start = np.zeros(1, dtype=np.int64)
        return Cut(start, start, source.block.block_bytes)
    runs = _runs_before_heads(source.block)
    assert runs is not None
    head_bytes = source.block.block_bytes // (runs * source.block.num_kv_heads)

    def offsets(side: SlabLayout) -> Offsets:
        within = (first - side.heads.start) * head_bytes
        return np.arange(runs, dtype=np.int64) * (side.block.num_kv_heads * head_bytes) + within

    return Cut(offsets(source), offsets(destination), num_heads * head_bytes)


def sources_for(destination: SlabLayout, sources: Sequence[SlabLayout]) -> list[RankCut]:
    """The fewest of a peer's ranks that fill the destination's block, in order of heads. MissingHeads otherwise, and
    IncompatibleLayout where a source is none, or they are not ranks of one peer.

    Of replicas each destination rank takes another one, as far as there are so many.
    """
    replicas: dict[int, list[RankCut]] = {}
    missing = set(destination.heads)
    for source in sorted(sources, key=lambda each: each.tp_rank):
        if source.tp_degree != sources[0].tp_degree:
            raise IncompatibleLayout(
                f"ranks of degrees {sources[0].tp_degree} and {source.tp_degree} are no one peer's: run one version"
            )
        if (found := cut(source, destination)) is not None:
            replicas.setdefault(source.heads.start, []).append(RankCut(source, found))
            missing.difference_update(source.heads)
    if missing:
        heads = _spans(sorted(missing))
        raise MissingHeads(
            f"no source rank has the KV heads {heads} that rank {destination.tp_rank} of {destination.tp_degree} "
            "needs: wait until all ranks of the peer have registered",
            heads=heads,
            num_sources=len(sources),
        )
    return [alike[destination.tp_rank % len(alike)] for _, alike in sorted(replicas.items())]


def _spans(numbers: Sequence[int]) -> str:
    """Text such as 0-3, 6."""
    starts = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(starts, ends, strict=True))


def expand(blocks: npt.ArrayLike, block_bytes: int, cut_offsets: Offsets) -> Offsets:
    """Offsets in a slab of the pieces of these blocks: all of the first block, then all of the second."""
    starts = np.asarray(blocks, dtype=np.int64) * block_bytes
    return (starts[:, np.newaxis] + cut_offsets).ravel()
