# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged decode attention in Triton: one query token per sequence, with its KV blocks in the slab.

    grid (kv head, sequence, split)            each program: all query heads of one kv head, one part of the
        |                                      context, read once; a running softmax over tiles of tokens
        v
    partial outputs and their log-sum-exp  ->  combine, grid (query head, sequence)

Owns the kernel and the number of splits. The grid depends only on the batch; lengths and block tables are
read from device memory, so a captured CUDA graph works for any contexts. Must not know models or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64
_INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Tile sizes, tuned on an H200."""

    tile_bytes: int = 16384
    """Bytes of keys, and of values, in one tile of 16 (the minimum of a matrix unit) to 64 tokens."""
    num_warps: int = 4
    num_stages: int = 5
    """Two stages hide the load of the block table, so 5 keep two tiles of keys and values in flight."""
    programs_per_processor: int = 4
    """Contexts are split until there are about this many programs per multiprocessor."""

    def tile_tokens(self, head_dim: int, itemsize: int) -> int:
        if itemsize == 4:  # no matrix unit: larger tiles would not fit the registers
            return 16
        return max(16, min(64, self.tile_bytes // (head_dim * itemsize)))


DEFAULT_SHAPE = DecodeShape()


def num_splits(batch: int, num_kv_heads: int, processors: int, shape: DecodeShape = DEFAULT_SHAPE) -> int:
    """Number of parts per context: a power of two that depends on the batch but not on the lengths."""
    needed = shape.programs_per_processor * processors / (batch * num_kv_heads)
    splits = 1
    while splits < min(needed, _MAX_SPLITS):
        splits *= 2
    return splits


@triton.jit
def _first_tile(context, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """First token of a split; every split but the last active one has the same number of whole tiles."""
    tiles = (context + TILE - 1) // TILE
    return split * ((tiles + SPLITS - 1) // SPLITS) * TILE


# Slices of a batch have any alignment: a variant per alignment would be compiled while serving.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    tables_ptr,
    lens_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + row)
    first = _first_tile(context, split, TILE, SPLITS)
    last = tl.minimum(_first_tile(context, split + 1, TILE, SPLITS), context)
    if SPLITS > 1 and first >= last:  # the combine kernel does not read empty splits
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_DIM)
    in_group = group[:, None] < GROUP
    query_head = kv_head * GROUP + group
    q_offsets = row * q_row_stride + query_head[:, None] * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=in_group, other=0.0)

    k_head_ptr = k_ptr + kv_head * head_stride + dims[None, :]
    v_head_ptr = v_ptr + kv_head * head_stride + dims[None, :]
    table_ptr = tables_ptr + row * table_stride
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.full([GROUP_PAD], 0.0, tl.float32)
    acc = tl.full([GROUP_PAD, HEAD_DIM], 0.0, tl.float32)
    for start in range(first, last, TILE):
        tokens = start + tl.arange(0, TILE)
        valid = tokens < last
        # int64: a slab has more than 2**31 elements
        block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        offsets = block * block_stride + (tokens % BLOCK_SIZE) * token_stride
        k = tl.load(k_head_ptr + offsets[:, None], mask=valid[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        # masked: rows past the context may hold anything, and 0 * nan is nan
        v = tl.load(v_head_ptr + offsets[:, None], mask=valid[:, None], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # an empty (padding) row results in zeros
    head_row = (row * tl.num_programs(0) * GROUP + query_head) * SPLITS + split
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head_row[:, None] * HEAD_DIM + dims[None, :], out, mask=in_group)
    if SPLITS > 1:
        tl.store(lse_ptr + head_row, peak + tl.log2(total), mask=group < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lens_ptr"])
def _combine_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    lens_ptr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head_row = row * tl.num_programs(0) + head
    context = tl.load(lens_ptr + row)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    written = _first_tile(context, splits, TILE, SPLITS) < context
    lse = tl.load(lse_ptr + head_row * SPLITS + splits, mask=written, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.where(written, tl.exp2(lse - tl.where(context > 0, peak, 0.0)), 0.0)
    offsets = (head_row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(part_ptr + offsets, mask=written[:, None], other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + head_row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))


def processors_of(device: torch.device) -> int:
    """Number of multiprocessors of a device; small if the kernels are interpreted."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def precision_of(dtype: torch.dtype) -> str:
    """Triton's input precision: no tf32 for float32, which is used where exactness matters."""
    return "ieee" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The KV that queries read: views [blocks, kv_heads, block_size, head_dim] of a layer, and block tables."""

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    """[S, max_blocks] int32."""
    context_lens: Tensor
    """[S] int32; 0 for a padding row, whose output is zeros."""

    def check(self, q: Tensor) -> None:
        """Assert the strides and sizes that the kernels require."""
        num_kv_heads, block_size, head_dim = self.keys.shape[1:]
        assert self.keys.stride() == self.values.stride(), "keys and values must have the same strides"
        assert self.keys.stride(3) == 1, "a token's head must be contiguous"
        assert block_size in (16, 32, 64, 128, 256, 512, 1024), f"block size {block_size}"
        assert head_dim in (16, 32, 64, 128, 256), f"head dim {head_dim}"
        assert q.shape[1] % num_kv_heads == 0, f"{q.shape[1]} heads over {num_kv_heads}"
        assert q.shape[2] == head_dim, f"queries of {q.shape[2]}, keys of {head_dim}"
        assert q.stride(2) == self.block_tables.stride(1) == self.context_lens.stride(0) == 1


def decode_attention(
    q: Tensor,
    context: PagedContext,
    scale: float,
    *,
    out: Tensor | None = None,
    splits: int | None = None,
    shape: DecodeShape = DEFAULT_SHAPE,
) -> Tensor:
    """Attention of one query token per sequence: q [S, heads, head_dim] -> out, contiguous with q's shape."""
    context.check(q)
    rows, heads, head_dim = q.shape
    num_kv_heads, block_size = context.keys.shape[1:3]
    if splits is None:
        splits = num_splits(rows, num_kv_heads, processors_of(q.device), shape)
    if out is None:
        out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    assert out.is_contiguous()
    group = heads // num_kv_heads
    tile = shape.tile_tokens(head_dim, q.element_size())
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty((rows, heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    options: dict[str, Any] = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    _decode_kernel[(num_kv_heads, rows, splits)](
        q,
        context.keys,
        context.values,
        parts,
        lse,
        context.block_tables,
        context.context_lens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        context.keys.stride(0),
        context.keys.stride(1),
        context.keys.stride(2),
        context.block_tables.stride(0),
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
        SPLITS=splits,
        PRECISION=precision_of(q.dtype),
        **options,
    )
    if splits > 1:
        _combine_kernel[(heads, rows)](
            parts,
            lse,
            out,
            context.context_lens,
            HEAD_DIM=head_dim,
            TILE=tile,
            SPLITS=splits,
            num_warps=4,
        )
    return out
