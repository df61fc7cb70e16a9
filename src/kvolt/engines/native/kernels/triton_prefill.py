# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Paged prefill attention in Triton: prefill chunks of many sequences in one launch.

A chunk's keys and values are already in the slab, so cached, earlier and new tokens are read alike, without gathering.
Grid (tile of queries, query head, sequence); tiles beyond the end of a short chunk return immediately. Must not know
models or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvolt.engines.native.kernels.triton_decode import LOG2_E, PagedContext, precision_of


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Tile sizes, tuned on an H200."""

    query_tile: int = 128
    key_tile: int = 64
    num_warps: int = 8
    num_stages: int = 3


DEFAULT_SHAPE = PrefillShape()
_EXACT_SHAPE = PrefillShape(query_tile=16, key_tile=16, num_warps=4, num_stages=1)
"""For float32, which has no exact matrix unit: small tiles, in registers."""


@triton.jit
def _prefill_tile(
    q,
    acc,
    peak,
    total,
    k_head_ptr,
    v_head_ptr,
    table_ptr,
    tokens,
    context,
    positions,
    scale_log2,
    block_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Advance the running softmax by one tile of keys."""
    if MASKED:
        valid = tokens < context
        block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + tokens // BLOCK_SIZE).to(tl.int64)
    offsets = (block * block_stride + (tokens % BLOCK_SIZE) * token_stride)[:, None]
    mask = valid[:, None] if MASKED else None
    k = tl.load(k_head_ptr + offsets, mask=mask, other=0.0 if MASKED else None)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if MASKED:
        scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    v = tl.load(v_head_ptr + offsets, mask=mask, other=0.0 if MASKED else None)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_peak, total


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr", "starts_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    lens_ptr,
    starts_ptr,
    scale_log2,
    q_row_stride,
    q_head_stride,
    block_stride,
    head_stride,
    token_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles with the longest context first
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    query_start = tl.load(starts_ptr + sequence)
    query_len = tl.load(starts_ptr + sequence + 1) - query_start
    first_row = tile * QUERY_TILE
    if first_row >= query_len:
        return
    context = tl.load(lens_ptr + sequence)
    past = context - query_len

    rows = first_row + tl.arange(0, QUERY_TILE)
    in_chunk = rows[:, None] < query_len
    dims = tl.arange(0, HEAD_DIM)
    flat_rows = (query_start + rows).to(tl.int64)
    q_offsets = flat_rows[:, None] * q_row_stride + head * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=in_chunk, other=0.0)

    kv_head = head // GROUP
    k_head_ptr = k_ptr + kv_head * head_stride + dims[None, :]
    v_head_ptr = v_ptr + kv_head * head_stride + dims[None, :]
    table_ptr = tables_ptr + sequence * table_stride
    positions = past + rows
    peak = tl.full([QUERY_TILE], float("-inf"), tl.float32)
    total = tl.full([QUERY_TILE], 0.0, tl.float32)
    acc = tl.full([QUERY_TILE, HEAD_DIM], 0.0, tl.float32)
    # The first row sees `past + first_row + 1` keys: whole tiles of those need no mask.
    open_end = (past + first_row + 1) // KEY_TILE * KEY_TILE
    end = tl.minimum(past + first_row + QUERY_TILE, context)
    keys = tl.arange(0, KEY_TILE)
    for start in range(0, open_end, KEY_TILE):
        acc, peak, total = _prefill_tile(
            q,
            acc,
            peak,
            total,
            k_head_ptr,
            v_head_ptr,
            table_ptr,
            start + keys,
            context,
            positions,
            scale_log2,
            block_stride,
            token_stride,
            BLOCK_SIZE=BLOCK_SIZE,
            MASKED=False,
            PRECISION=PRECISION,
        )
    for start in range(open_end, end, KEY_TILE):
        acc, peak, total = _prefill_tile(
            q,
            acc,
            peak,
            total,
            k_head_ptr,
            v_head_ptr,
            table_ptr,
            start + keys,
            context,
            positions,
            scale_log2,
            block_stride,
            token_stride,
            BLOCK_SIZE=BLOCK_SIZE,
            MASKED=True,
            PRECISION=PRECISION,
        )
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    out_offsets = (flat_rows[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_offsets, out, mask=in_chunk)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The rows of each prefill chunk in a flat batch."""

    query_starts: Tensor
    """[S + 1] int32 on the device: first row of each chunk in q, and the end."""
    max_queries: int
    """Length of the longest chunk."""


def prefill_attention(
    q: Tensor,
    context: PagedContext,
    chunks: Chunks,
    scale: float,
    *,
    out: Tensor,
    shape: PrefillShape = DEFAULT_SHAPE,
) -> None:
    """Causal attention of each chunk's rows of q [T, heads, head_dim], written to the same rows of `out`.

    A chunk is the last part of its context: its last row sees all keys, the one before it one fewer, and so on.
    """
    context.check(q)
    assert out.is_contiguous()
    _, heads, head_dim = q.shape
    num_kv_heads, block_size = context.keys.shape[1:3]
    if q.dtype == torch.float32:
        shape = _EXACT_SHAPE
    grid = (triton.cdiv(chunks.max_queries, shape.query_tile), heads, context.context_lens.shape[0])
    _prefill_kernel[grid](
        q,
        context.keys,
        context.values,
        out,
        context.block_tables,
        context.context_lens,
        chunks.query_starts,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        *context.keys.stride()[:3],
        context.block_tables.stride(0),
        NUM_HEADS=heads,
        GROUP=heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUERY_TILE=shape.query_tile,
        KEY_TILE=shape.key_tile,
        PRECISION=precision_of(q.dtype),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
