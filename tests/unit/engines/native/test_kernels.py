"""The GPU kernels, interpreted on the CPU, beside plain torch.

In float32 and float16: the interpreter has no bfloat16 products. `benchmarks/engine/gpu.py` checks those.
"""

from __future__ import annotations

import os
import random
import sys

import pytest

torch = pytest.importorskip("torch")
# Triton reads this when its own library and our kernels are defined: a copy that was there before is of no use.
os.environ["TRITON_INTERPRET"] = "1"
for name in list(sys.modules):
    if name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C")):
        del sys.modules[name]
pytest.importorskip("triton")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from kvolt.core.errors import ConfigError  # noqa: E402
from kvolt.engines.native.batch import Batch  # noqa: E402
from kvolt.engines.native.graphs import DecodeGraphs, GraphLimits, Run, sizes_up_to  # noqa: E402
from kvolt.engines.native.kernels import operations, triton_fused  # noqa: E402
from kvolt.engines.native.kernels.triton_decode import (  # noqa: E402
    PagedContext,
    decode_attention,
    num_splits,
)
from kvolt.engines.native.model.attention_cuda import CudaAttention  # noqa: E402
from kvolt.engines.native.slab import KvSlab, SlabShape  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(left: Tensor, right: Tensor) -> None:
    bound = TOLERANCE[left.dtype]
    torch.testing.assert_close(left.float(), right.float(), atol=bound, rtol=bound)


def slab_of(num_kv_heads: int, head_dim: int, block_size: int, num_blocks: int, dtype: str) -> KvSlab:
    """Two layers, and not a number anywhere that has not been written."""
    slab = KvSlab(
        SlabShape(
            num_blocks=num_blocks,
            num_layers=2,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            dtype=dtype,
        )
    )
    slab.tensor.fill_(float("nan"))
    return slab


class Paged:
    """Sequences whose KV lies in random blocks of a slab, with the same KV contiguous beside it."""

    def __init__(self, slab: KvSlab, lens: list[int], layer: int = 1, seed: int = 0) -> None:
        shape = slab.shape
        self.slab, self.lens, self.layer = slab, lens, layer
        free = list(range(shape.num_blocks - 1))  # the last is spare
        random.Random(seed).shuffle(free)
        self.blocks = [[free.pop() for _ in range(-(-max(length, 1) // shape.block_size))] for length in lens]
        self.tables = torch.full((len(lens), max(map(len, self.blocks)) + 1), 10**6, dtype=torch.int32)
        for row, blocks in zip(self.tables, self.blocks, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        self.kv = [
            normal(
                2, length, shape.num_kv_heads, shape.head_dim, dtype=slab.tensor.dtype, seed=seed + 1 + row
            )
            for row, length in enumerate(lens)
        ]

    def slots(self, row: int, start: int, end: int) -> Tensor:
        size = self.slab.shape.block_size
        return torch.tensor(
            [self.blocks[row][at // size] * size + at % size for at in range(start, end)]
        ).long()

    def write(self, row: int, end: int) -> None:
        slots, size = self.slots(row, 0, end), self.slab.shape.block_size
        for cache, written in zip(self.slab.layer(self.layer), self.kv[row], strict=True):
            cache[slots // size, :, slots % size] = written[:end]

    def attended(self, row: int, q: Tensor) -> Tensor:
        """q: the last queries of the row's context, [L, heads, hd]."""
        k, v = self.kv[row].transpose(1, 2)
        seen = torch.ones((len(q), self.lens[row]), dtype=torch.bool).tril(self.lens[row] - len(q))
        out = F.scaled_dot_product_attention(
            *(x.float()[None] for x in (q.transpose(0, 1), k, v)), attn_mask=seen, enable_gqa=True
        )
        return out[0].transpose(0, 1).to(q.dtype)


def test_the_kernels_run_interpreted() -> None:
    assert type(triton_fused._silu_mul_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype", "splits"),
    [
        (1, 64, 16, "float32", 1),
        (3, 64, 32, "float16", 4),
        (4, 128, 16, "float16", 2),
        (8, 128, 64, "float32", 4),
        (17, 16, 128, "float16", 1),
    ],
)
def test_decode_equals_sdpa(group: int, head_dim: int, block_size: int, dtype: str, splits: int) -> None:
    lens = [1, 200, 65, 0]
    slab = slab_of(2, head_dim, block_size, 50, dtype)
    paged = Paged(slab, lens)
    for row, length in enumerate(lens):
        paged.write(row, length)
    # a slice of a wider product, as the queries of a fused one are
    q = normal(len(lens), 2 * group + 3, head_dim, dtype=slab.tensor.dtype, seed=99)[:, 1 : 1 + 2 * group]
    context = PagedContext(*slab.layer(1), paged.tables, torch.tensor(lens, dtype=torch.int32))
    out = decode_attention(q, context, head_dim**-0.5, splits=splits)
    for row, length in enumerate(lens):
        expected = paged.attended(row, q[row : row + 1])[0] if length else torch.zeros_like(out[row])
        close(out[row], expected)


def test_splits_fill_the_processors_and_depend_on_the_batch_alone() -> None:
    assert [num_splits(batch, 8, 132) for batch in (1, 8, 32, 256)] == [64, 16, 4, 1]
    assert num_splits(1, 1, 132) == 64


def unturned(head_dim: int) -> operations.Rotation:
    """No position turns anything."""
    return operations.Rotation(torch.ones(200, head_dim // 2), torch.zeros(200, head_dim // 2))


def mixed_batch(paged: Paged, chunks: list[int], num_decodes: int) -> Batch:
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk)
    slots = [
        paged.slots(row, length - chunk, length)
        for row, (length, chunk) in enumerate(zip(paged.lens, chunks, strict=True))
    ]
    positions = [
        torch.arange(length - chunk, length) for length, chunk in zip(paged.lens, chunks, strict=True)
    ]
    return Batch(
        token_ids=torch.zeros(starts[-1], dtype=torch.int64),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        num_decodes=num_decodes,
        query_starts=starts,
        context_lens=paged.lens,
        context_lens_t=torch.tensor(paged.lens, dtype=torch.int32),
        block_tables=paged.tables,
        logit_rows=torch.tensor(starts[1:]) - 1,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mixed_step_writes_its_kv_and_attends(dtype: str) -> None:
    """Two decodes, a whole prompt, a chunk after cached tokens, a chunk of one block's end."""
    lens, chunks = [33, 1, 20, 75, 48], [1, 1, 20, 40, 5]
    slab = slab_of(2, 64, 16, 40, dtype)
    paged = Paged(slab, lens, seed=7)
    for row, (length, chunk) in enumerate(zip(lens, chunks, strict=True)):
        paged.write(row, length - chunk)
    batch = mixed_batch(paged, chunks, num_decodes=2)
    fresh = [kv[:, length - chunk :] for kv, length, chunk in zip(paged.kv, lens, chunks, strict=True)]
    k, v = torch.cat(fresh, dim=1)
    q = normal(len(k), 4, 64, dtype=slab.tensor.dtype, seed=5)
    attention = CudaAttention(slab, 64**-0.5)
    out = attention.rotate_and_attend(1, q, k, v, unturned(64), batch)
    assert out.shape == (len(k), 4 * 64)
    for row, (start, end) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
        close(out[start:end].view(-1, 4, 64), paged.attended(row, q[start:end]))
    assert bool(slab.tensor[:, 0].isnan().all()), "another layer was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [64, 576])
def test_add_rmsnorm(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(5, width, dtype=dtype, seed=seed) for seed in range(3))
    expected, summed = operations.plain_add_rmsnorm(x, residual.clone(), weight[0], 1e-5)
    normed, updated = triton_fused.add_rmsnorm(x, residual, weight[0], 1e-5)
    assert updated is residual
    assert torch.equal(residual, summed)
    close(normed, expected)
    first, kept = triton_fused.add_rmsnorm(x, None, weight[0], 1e-5)
    assert kept is x
    close(first, operations.plain_rmsnorm(x, weight[0], 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = normal(4, 2 * 1300, dtype=dtype)
    close(triton_fused.silu_mul(gate_up), operations.plain_silu_mul(gate_up))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "normed", "dtype"),
    [(9, 3, False, "float32"), (16, 2, True, "float16"), (3, 12, True, "float32"), (8, 8, False, "float16")],
)
def test_rotation_turns_in_place_and_fills_the_slots(
    heads: int, kv_heads: int, normed: bool, dtype: str
) -> None:
    head_dim, rows = 32, 4
    slab, other = (slab_of(kv_heads, head_dim, 16, 3, dtype) for _ in range(2))
    torch_dtype = slab.tensor.dtype
    qkv = normal(rows, heads + 2 * kv_heads, head_dim, dtype=torch_dtype)
    plain = qkv.clone()
    slots = torch.tensor([40, 3, 16, 17])
    positions = torch.tensor([0, 7, 99, 42])
    angles = torch.outer(torch.arange(100).float(), 100.0 ** -torch.linspace(0, 1, head_dim // 2))
    weights = [normal(head_dim, dtype=torch_dtype, seed=seed) if normed else None for seed in (8, 9)]
    rotation = operations.Rotation(angles.cos(), angles.sin(), *weights)
    sizes = [heads, kv_heads, kv_heads]
    fused_target = operations.KvTarget(*slab.layer(0), slots)
    triton_fused.rotate_and_write(*qkv.split(sizes, dim=1), positions, rotation, fused_target)
    plain_target = operations.KvTarget(*other.layer(0), slots)
    operations.plain_rotate_and_write(*plain.split(sizes, dim=1), positions, rotation, plain_target)
    close(qkv, plain)
    assert not torch.equal(
        qkv[1, : heads + kv_heads], normal(*qkv.shape, dtype=torch_dtype)[1, : heads + kv_heads]
    )
    assert torch.equal(slab.tensor.isnan(), other.tensor.isnan())
    close(slab.tensor.nan_to_num(), other.tensor.nan_to_num())
    assert int((~slab.tensor.isnan()).sum()) == 2 * rows * kv_heads * head_dim


def again(run: Run) -> Run:
    """A recorder for machines without graphs: runs now, and runs again at replay."""
    run()
    return run


def test_padded_rows_of_a_graph_touch_nothing_but_the_spare_block() -> None:
    lens = [20, 1, 33]
    slab = slab_of(2, 16, 16, 12, "float32")
    paged = Paged(slab, lens, layer=0)
    for row, length in enumerate(lens):
        paged.write(row, length - 1)
    attention = CudaAttention(slab, 0.25)
    q_of = normal(50, 4, 16, seed=3)
    k_of, v_of = normal(2, 50, 2, 16, seed=4)

    def forward(batch: Batch) -> Tensor:
        tokens = batch.token_ids
        return attention.rotate_and_attend(0, q_of[tokens], k_of[tokens], v_of[tokens], unturned(16), batch)

    limits = GraphLimits(max_blocks=8, spare_slot=11 * 16, sizes=(2, 4))
    graphs = DecodeGraphs(forward, limits, torch.device("cpu"), recorder=again)
    batch = mixed_batch(paged, [1, 1, 1], num_decodes=3)
    assert not graphs.covers(batch), "nothing is captured yet"
    graphs.capture()
    before = slab.tensor.clone()
    batch.token_ids = torch.tensor([5, 6, 7])
    assert graphs.covers(batch)
    out = graphs.replay(batch)
    written = slab.tensor.clone()
    assert torch.equal(out, forward(batch)), "padding changed the result"
    assert torch.equal(written.nan_to_num(), slab.tensor.nan_to_num())
    changed = (written.nan_to_num() != before.nan_to_num()).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {blocks[-1] for blocks in paged.blocks} | {11}


def test_graphs_go_up_to_the_largest_batch() -> None:
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert sizes_up_to(1) == [1]
    for rows in (256, 300):
        sizes = sizes_up_to(rows)
        assert sizes[-1] == 256
        assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("head_dim", "block_size", "key"), [(80, 16, "model"), (64, 8, "args.block_size")])
def test_a_shape_the_kernels_cannot_take_is_a_wrong_setting(head_dim: int, block_size: int, key: str) -> None:
    operations.check_gpu_shape(64, 16)
    with pytest.raises(ConfigError) as caught:
        operations.check_gpu_shape(head_dim, block_size)
    assert caught.value.fields["key"] == key
    assert caught.value.fields["remedy"]


def test_graphs_take_only_what_they_were_captured_for() -> None:
    slab = slab_of(2, 16, 16, 60, "float32")
    seen: list[list[int]] = []

    def forward(batch: Batch) -> Tensor:
        seen.append(batch.context_lens_t.tolist())
        return batch.token_ids[:, None].float()

    limits = GraphLimits(max_blocks=4, spare_slot=0, sizes=(1, 4))
    graphs = DecodeGraphs(forward, limits, torch.device("cpu"), recorder=again)
    graphs.capture()
    assert seen == [[0] * 4, [0]]
    graphs.replay(mixed_batch(Paged(slab, [7, 8, 9, 10]), [1] * 4, num_decodes=4))
    fits = mixed_batch(Paged(slab, [5, 6]), [1, 1], num_decodes=2)
    fits.token_ids = torch.tensor([3, 4])
    assert graphs.replay(fits).tolist() == [[3.0], [4.0]]
    assert seen[2:] == [[7, 8, 9, 10], [5, 6, 0, 0]], "rows of an earlier batch are still attended"
    assert not graphs.covers(mixed_batch(Paged(slab, [5, 6]), [1, 2], num_decodes=1)), "a prefill"
    assert not graphs.covers(mixed_batch(Paged(slab, [5] * 5), [1] * 5, num_decodes=5)), "too many"
    assert not graphs.covers(mixed_batch(Paged(slab, [80]), [1], num_decodes=1)), "too long"
    fits.lora_rows = [("adapter", 0, 1)]
    assert not graphs.covers(fits), "an adapter"
