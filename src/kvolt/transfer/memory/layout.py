"""KV layout of slabs, and the byte ranges to copy between blocks of different TP ranks. Pure.

The TP ranks of a model share its KV heads; each rank has a contiguous range. With more ranks than heads, several ranks
are replicas with the same head.

    8 heads    degree 1  [0 1 2 3 4 5 6 7]              2 heads   degree 4  [0] [0] [1] [1]
               degree 2  [0 1 2 3] [4 5 6 7]                      degree 2  [0]     [1]
               degree 4  [0 1] [2 3] [4 5] [6 7]

If the TP degrees differ, a block is copied as equal pieces, one per combination of the axes before the heads. The order
of axes comes from the layout's name. Knows no memory and no peer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import Fault, KvoltError

Offsets = npt.NDArray[np.int64]

_AXES = frozenset(("layer", "kv", "head", "token"))
_CHECKSUM_WORD_BYTES = 8
"""Pieces of a multi-piece block must be a multiple of this for the checksum."""


class IncompatibleLayout(KvoltError):
    """Blocks of two slabs cannot be exchanged. The message is from `why_incompatible`."""

    code = "incompatible_layout"
    fault = Fault.OPERATOR


class MissingHeads(KvoltError):
    """The registered source ranks lack some heads. Fields: heads (text such as "4-7"), num_sources."""

    code = "missing_heads"
    fault = Fault.OPERATOR
    retryable = True
    """A missing rank may still be starting."""


class SlabLayout(msgspec.Struct, frozen=True, kw_only=True):
    """KV layout of one rank's slab; `of_rank` derives it from the layout of the whole model."""

    block: KvLayout
    """Layout of this rank's blocks, with the rank's number of heads and bytes."""
    total_kv_heads: int
    """KV heads of the model, which the rank's heads do not determine if heads are replicated."""
    tp_degree: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        total, degree, rank = self.total_kv_heads, self.tp_degree, self.tp_rank
        if total < 1 or degree < 1 or not 0 <= rank < degree:
            raise ValueError(f"invalid layout: rank {rank} of {degree} with {total} KV heads")
        if total % degree and degree % total:
            raise ValueError(
                f"{total} KV heads cannot be shared by {degree} ranks: choose a tensor parallelism that divides "
                "the number of heads, or a multiple of it"
            )
        if self.block.num_kv_heads != (share := max(total // degree, 1)):
            raise ValueError(
                f"a rank of {degree} must have {share} of {total} KV heads, not {self.block.num_kv_heads}"
            )

    @classmethod
    def of_rank(cls, model: KvLayout, degree: int = 1, rank: int = 0) -> SlabLayout:
        """`model`: layout of an engine with a single rank."""
        total = model.num_kv_heads
        share = max(total // max(degree, 1), 1)
        block = msgspec.structs.replace(
            model, num_kv_heads=share, block_bytes=model.block_bytes * share // total
        )
        return cls(block=block, total_kv_heads=total, tp_degree=degree, tp_rank=rank)

    @property
    def num_shares(self) -> int:
        """Number of ranks with different heads."""
        return min(self.tp_degree, self.total_kv_heads)

    @property
    def heads(self) -> range:
        """Heads of the model on this rank."""
        first = self.tp_rank * self.total_kv_heads // self.tp_degree
        return range(first, first + self.block.num_kv_heads)


class Cut(NamedTuple):
    """Equal pieces of a source block and their offsets in the destination block, in the same order."""

    source_offsets: Offsets
    destination_offsets: Offsets
    piece_bytes: int


class RankCut(NamedTuple):
    """Pieces provided by one source rank."""

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
    """Reason and remedy why blocks cannot be exchanged; None if they can."""
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
        remedy = "choose degrees such that one divides the other"
        return _differ("tensor parallelism", mine.tp_degree, theirs.tp_degree, remedy)
    if (
        mine.block.block_bytes * theirs.block.num_kv_heads
        != theirs.block.block_bytes * mine.block.num_kv_heads
    ):
        remedy = "start both workers with the same KV settings: blocks of one side have additional bytes"
        return _differ("block_bytes", mine.block.block_bytes, theirs.block.block_bytes, remedy)
    return None if fewer == more else _why_not_cut(mine, theirs)


def _differ(name: str, mine: object, theirs: object, remedy: str) -> str:
    return f"{name} is {mine} here and {theirs} there: {remedy}"


def _why_not_cut(mine: SlabLayout, theirs: SlabLayout) -> str | None:
    """Reason why two layouts with different TP degrees are incompatible."""
    degrees = f"tensor parallelism is {mine.tp_degree} here and {theirs.tp_degree} there"
    remedy = "use the same on both sides"
    runs = _runs_before_heads(mine.block)
    if runs is None:
        return f"{degrees}, and the position of heads is unknown for the axes {mine.block.name!r}: {remedy}"
    block = mine.block
    if block.block_bytes % (block.num_layers * 2 * block.num_kv_heads * block.block_size * block.head_dim):
        return (
            f"{degrees}, and blocks of {block.block_bytes} bytes are not a whole number of values: {remedy}"
        )
    num_heads = min(block.num_kv_heads, theirs.block.num_kv_heads)
    piece_bytes = num_heads * (block.block_bytes // (runs * block.num_kv_heads))
    if piece_bytes % _CHECKSUM_WORD_BYTES:
        return (
            f"{degrees}, and pieces of {piece_bytes} bytes are not a "
            f"multiple of {_CHECKSUM_WORD_BYTES}, which checksums require: {remedy}, or larger blocks"
        )
    return None


def _axes(block: KvLayout) -> list[str] | None:
    """Order of axes in a block, before the values of a head; None if the name does not encode it."""
    first, *axes = block.name.split("-")
    return axes if first == "block" and len(axes) == len(_AXES) and set(axes) == _AXES else None


def _runs_before_heads(block: KvLayout) -> int | None:
    """Number of contiguous runs of heads in a block; None if unknown."""
    axes = _axes(block)
    if axes is None:
        return None
    sizes = {"layer": block.num_layers, "kv": 2, "token": block.block_size}
    return math.prod(sizes[axis] for axis in axes[: axes.index("head")])


def cut(source: SlabLayout, destination: SlabLayout) -> Cut | None:
    """Pieces to copy from a source rank's block to a destination rank's; None without a common head.

    IncompatibleLayout if blocks cannot be exchanged.
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
    """Minimal set of a peer's ranks that provides all heads of the destination, ordered by head.

    Destination ranks are spread over replicas. MissingHeads if heads are missing, IncompatibleLayout if a source is
    incompatible or the sources have different degrees.
    """
    replicas: dict[int, list[RankCut]] = {}
    missing = set(destination.heads)
    for source in sorted(sources, key=lambda each: each.tp_rank):
        if source.tp_degree != sources[0].tp_degree:
            raise IncompatibleLayout(
                f"ranks of degrees {sources[0].tp_degree} and {source.tp_degree} do not belong to one peer: "
                "run one version"
            )
        if (pieces := cut(source, destination)) is not None:
            replicas.setdefault(source.heads.start, []).append(RankCut(source, pieces))
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
    """Text such as `0-3, 6`."""
    starts = [each for each in numbers if each - 1 not in numbers]
    ends = [each for each in numbers if each + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(starts, ends, strict=True))


def expand(blocks: npt.ArrayLike, block_bytes: int, cut_offsets: Offsets) -> Offsets:
    """Slab offsets of the pieces of these blocks, all pieces of one block before those of the next."""
    starts = np.asarray(blocks, dtype=np.int64) * block_bytes
    return (starts[:, np.newaxis] + cut_offsets).ravel()
