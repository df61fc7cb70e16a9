"""Layouts of slabs: who can exchange blocks, and which bytes go where. Moved bytes are compared with sliced tensors."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.block_key import KvLayout
from kvolt.transfer.memory.layout import (
    Cut,
    IncompatibleLayout,
    MissingHeads,
    SlabLayout,
    cut,
    expand,
    sources_for,
    why_incompatible,
)

AXES = "block-layer-kv-head-token"
NUM_BLOCKS = 3
Tensor = npt.NDArray[np.float32]


def model(num_kv_heads: int = 8, name: str = AXES, **changes: object) -> KvLayout:
    sizes = {"num_layers": 2, "head_dim": 4, "block_size": 2, "dtype": "float32"} | changes
    values = sizes["num_layers"] * 2 * num_kv_heads * sizes["block_size"] * sizes["head_dim"]  # type: ignore[operator]
    return KvLayout(name=name, num_kv_heads=num_kv_heads, block_bytes=4 * values, **sizes)  # type: ignore[arg-type]


def ranks(layout: KvLayout, degree: int) -> list[SlabLayout]:
    return [SlabLayout.of_rank(layout, degree, rank) for rank in range(degree)]


def head_axis(layout: KvLayout) -> int:
    return layout.name.split("-").index("head")


def whole_tensor(layout: KvLayout) -> Tensor:
    """Blocks of the whole model, in which no value is there twice."""
    sizes = {
        "block": NUM_BLOCKS,
        "layer": layout.num_layers,
        "kv": 2,
        "head": layout.num_kv_heads,
        "token": layout.block_size,
    }
    shape = (*(sizes[axis] for axis in layout.name.split("-")), layout.head_dim)
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def slab_of(layout: KvLayout, rank: SlabLayout) -> Tensor:
    """What a rank's slab holds, sliced from the tensor."""
    return np.ascontiguousarray(np.take(whole_tensor(layout), list(rank.heads), axis=head_axis(layout)))


def move(source: Tensor, destination: Tensor, rank: SlabLayout, to: SlabLayout, pieces: Cut) -> None:
    """As an executor does: blocks in the opposite order, by offsets alone."""
    blocks = np.arange(NUM_BLOCKS)
    starts = expand(blocks, rank.block.block_bytes, pieces.source_offsets)
    ends = expand(blocks[::-1], to.block.block_bytes, pieces.destination_offsets)
    read, written = source.reshape(-1).view(np.uint8), destination.reshape(-1).view(np.uint8)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        written[end : end + pieces.piece_bytes] = read[start : start + pieces.piece_bytes]


@pytest.mark.parametrize(
    ("total", "degree", "heads"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (1, 2, [range(1), range(1)]),
    ],
)
def test_a_rank_has_its_share_of_the_heads(total: int, degree: int, heads: list[range]) -> None:
    layouts = ranks(model(total), degree)
    assert [layout.heads for layout in layouts] == heads
    for layout in layouts:
        assert layout.block.num_kv_heads == len(layout.heads)
        assert layout.block.block_bytes * total == model(total).block_bytes * len(layout.heads)


@pytest.mark.parametrize(("total", "degree"), [(8, 3), (2, 3), (6, 4)])
def test_heads_that_ranks_cannot_share_evenly_are_refused(total: int, degree: int) -> None:
    with pytest.raises(ValueError, match=f"{total} KV heads cannot be shared by {degree} ranks: choose"):
        SlabLayout.of_rank(model(total), degree)


@pytest.mark.parametrize(("degree", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_a_rank_that_cannot_be_is_refused(degree: int, rank: int) -> None:
    with pytest.raises(ValueError, match="invalid layout"):
        SlabLayout.of_rank(model(), degree, rank)


def test_a_share_that_is_not_the_rank_s_is_refused_from_the_wire_too() -> None:
    with pytest.raises(ValueError, match="a rank of 2 must have 4 of 8 KV heads, not 8"):
        SlabLayout(block=model(8), total_kv_heads=8, tp_degree=2)
    layout = SlabLayout.of_rank(model(8), 2, 1)
    encoded = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(encoded, type=SlabLayout) == layout
    broken = msgspec.to_builtins(layout) | {"tp_degree": 4}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(broken, SlabLayout)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (model(dtype="bfloat16"), "dtype is float32 here and bfloat16 there: start both"),
        (model(num_layers=3), "num_layers is 2 here and 3 there: serve the same model"),
        (model(head_dim=8), "head_dim is 4 here and 8 there: serve the same model"),
        (
            model(block_size=4),
            "block_size is 2 here and 4 there: start both workers with the same block size",
        ),
        (model(4), "num_kv_heads is 8 here and 4 there: serve the same model"),
        (
            model(name="block-layer-kv-token-head"),
            f"order of axes is {AXES} here and block-layer-kv-token-head there: run the same",
        ),
        (
            msgspec.structs.replace(model(), block_bytes=model().block_bytes + 64),
            f"block_bytes is {model().block_bytes} here and {model().block_bytes + 64} there: start both",
        ),
    ],
    ids=["dtype", "layers", "head_dim", "block_size", "heads", "axes", "block_bytes"],
)
def test_a_difference_is_refused_by_its_name(theirs: KvLayout, words: str) -> None:
    mine, other = SlabLayout.of_rank(model()), SlabLayout.of_rank(theirs)
    reason = why_incompatible(mine, other)
    assert reason is not None
    assert reason.startswith(words)
    with pytest.raises(IncompatibleLayout, match="there: "):
        cut(other, mine)


def test_equal_layouts_are_compatible_whatever_their_name() -> None:
    layout = SlabLayout.of_rank(model(1, name="sim"))
    assert why_incompatible(layout, layout) is None
    whole = cut(layout, layout)
    assert whole is not None
    assert whole.piece_bytes == layout.block.block_bytes
    assert whole.source_offsets.tolist() == whole.destination_offsets.tolist() == [0]


@pytest.mark.parametrize(("mine", "theirs"), [(3, 2), (2, 3)])
def test_degrees_of_which_none_divides_the_other_are_refused(mine: int, theirs: int) -> None:
    reason = why_incompatible(SlabLayout.of_rank(model(6), mine), SlabLayout.of_rank(model(6), theirs))
    assert reason == (
        f"tensor parallelism is {mine} here and {theirs} there: choose degrees such that one divides the other"
    )


@pytest.mark.parametrize(
    "name", ["sim", "block-layer-kv-token", "layer-block-kv-head-token", "block-a-b-c-d"]
)
def test_heads_are_not_cut_where_the_axes_are_unknown(name: str) -> None:
    layout = model(name=name)
    reason = why_incompatible(SlabLayout.of_rank(layout), SlabLayout.of_rank(layout, 2))
    assert reason is not None
    assert f"the position of heads is unknown for the axes {name!r}: use the same" in reason


def test_blocks_that_hold_more_than_values_are_not_cut() -> None:
    layout = msgspec.structs.replace(model(), block_bytes=model().block_bytes + 8)
    reason = why_incompatible(SlabLayout.of_rank(layout), SlabLayout.of_rank(layout, 2))
    assert reason is not None
    assert "are not a whole number of values: use the same" in reason


def test_pieces_that_have_no_checksum_are_refused() -> None:
    layout = model(head_dim=1, block_size=1)
    reason = why_incompatible(SlabLayout.of_rank(layout), SlabLayout.of_rank(layout, 8))
    assert reason is not None
    assert "pieces of 4 bytes are not a multiple of 8" in reason
    assert why_incompatible(SlabLayout.of_rank(layout), SlabLayout.of_rank(layout, 4)) is None


def test_ranks_without_a_head_in_common_have_no_cut() -> None:
    first, second = ranks(model(), 2)
    assert cut(first, second) is None


def test_the_pieces_of_a_half() -> None:
    layout = model(2)
    half = layout.block_bytes // 2
    found = cut(SlabLayout.of_rank(layout, 2, 1), SlabLayout.of_rank(layout))
    assert found is not None
    assert found.piece_bytes == half // 4  # two layers, keys and values
    assert found.source_offsets.tolist() == [0, 32, 64, 96]
    assert found.destination_offsets.tolist() == [32, 96, 160, 224]
    assert found.source_offsets.dtype == found.destination_offsets.dtype == np.int64


DEGREES = [(2, 1), (1, 2), (4, 2), (2, 4), (3, 1), (3, 6), (4, 4), (8, 2), (1, 1)]
ORDERS = [AXES, "block-head-layer-kv-token", "block-layer-head-kv-token", "block-layer-kv-token-head"]


@given(
    degrees=st.sampled_from(DEGREES),
    heads_per_share=st.sampled_from([1, 2, 3]),
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6]),
    name=st.sampled_from(ORDERS),
)
def test_what_is_moved_by_cuts_is_what_is_sliced_from_the_tensor(
    degrees: tuple[int, int],
    heads_per_share: int,
    num_layers: int,
    block_size: int,
    head_dim: int,
    name: str,
) -> None:
    source_degree, degree = degrees
    total = max(degrees) * heads_per_share
    layout = model(total, name, num_layers=num_layers, block_size=block_size, head_dim=head_dim)
    check_moves(layout, source_degree, degree)


@pytest.mark.parametrize(
    ("total", "source_degree", "degree"), [(2, 4, 1), (2, 1, 4), (2, 4, 2), (2, 6, 4), (1, 2, 4)]
)
def test_heads_that_are_on_several_ranks_are_taken_from_one(
    total: int, source_degree: int, degree: int
) -> None:
    check_moves(model(total), source_degree, degree)


def check_moves(layout: KvLayout, source_degree: int, degree: int) -> None:
    sources = ranks(layout, source_degree)
    for destination in ranks(layout, degree):
        assert all(why_incompatible(destination, source) is None for source in sources)
        wanted = slab_of(layout, destination)
        arrived = np.zeros_like(wanted)
        select_blocks = sources_for(destination, sources[::-1])
        for source, pieces in select_blocks:
            before = arrived.copy()
            move(slab_of(layout, source), arrived, source, destination, pieces)
            assert not np.any(before[arrived != before]), "two sources wrote to the same bytes"
        np.testing.assert_array_equal(arrived[::-1], wanted)
        moved = sum(len(pieces.source_offsets) * pieces.piece_bytes for _, pieces in select_blocks)
        assert moved == destination.block.block_bytes
        assert len(select_blocks) == max(sources[0].num_shares // destination.num_shares, 1)


def test_destination_ranks_take_different_replicas() -> None:
    sources = ranks(model(2), 4)
    select_blocks = [sources_for(destination, sources) for destination in sources]
    assert [[source.tp_rank for source, _ in each] for each in select_blocks] == [[0], [1], [2], [3]]


def test_missing_heads_are_named() -> None:
    sources = ranks(model(8), 8)
    with pytest.raises(
        MissingHeads, match=r"no source rank has the KV heads 1-3, 6 that rank 0 of 1 needs: wait"
    ) as caught:
        sources_for(
            SlabLayout.of_rank(model(8)), [each for each in sources if each.tp_rank not in (1, 2, 3, 6)]
        )
    assert caught.value.fields == {"heads": "1-3, 6", "num_sources": 4}
    with pytest.raises(MissingHeads):
        sources_for(SlabLayout.of_rank(model(8)), [])


def test_ranks_of_different_degrees_are_no_peer() -> None:
    with pytest.raises(IncompatibleLayout, match="degrees 2 and 4"):
        sources_for(
            SlabLayout.of_rank(model()), [SlabLayout.of_rank(model(), 2), SlabLayout.of_rank(model(), 4, 2)]
        )


def test_offsets_are_in_order_of_blocks() -> None:
    offsets = expand([5, 0], 100, np.array([0, 30], dtype=np.int64))
    assert offsets.tolist() == [500, 530, 0, 30]
    assert offsets.dtype == np.int64
    assert expand([], 100, np.array([0], dtype=np.int64)).tolist() == []
    assert expand(np.array([3], dtype=np.int32), 1 << 40, np.zeros(1, dtype=np.int64)).tolist() == [3 << 40]
