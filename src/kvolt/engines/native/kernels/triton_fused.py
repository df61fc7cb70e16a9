# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Triton forms of `kernels.operations`: one pass over memory instead of three to ten in plain torch.

Each rounds at the same points as its plain form, so results are equal or differ in the last bit. Must not know models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvolt.engines.native.kernels.inputs import KvTarget, Rotation

_HEADS_TILE = 8
_WIDTH_TILE = 1024


@triton.jit
def _add_rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row * width + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * width + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


def add_rmsnorm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `operations.add_rmsnorm`."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    width_pad = triton.next_power_of_2(width)
    _add_rmsnorm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        width,
        eps,
        HAS_RESIDUAL=residual is not None,
        WIDTH_PAD=width_pad,
        num_warps=min(16, max(1, width_pad // 512)),
    )
    return out, x if residual is None else residual


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, row_stride, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * row_stride + width + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + columns, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `operations.silu_mul`."""
    rows, both = gate_up.shape
    width = both // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _WIDTH_TILE))
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, TILE=_WIDTH_TILE, num_warps=4)
    return out


@triton.jit
def _rotate_heads(
    x_ptr, offsets, inside, cos, sin, half, norm_ptr, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Normalise (with HAS_NORM) and rotate a tile of heads in place; returns both halves of the result."""
    first = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    second = tl.load(x_ptr + offsets + HALF, mask=inside, other=0.0)
    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(wide_first * wide_first, 1) + tl.sum(wide_second * wide_second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        weight_first = tl.load(norm_ptr + half)[None, :].to(tl.float32)
        weight_second = tl.load(norm_ptr + HALF + half)[None, :].to(tl.float32)
        # rounded twice, as in the plain form
        wide_first = (wide_first * scale).to(first.dtype).to(tl.float32) * weight_first
        wide_second = (wide_second * scale).to(first.dtype).to(tl.float32) * weight_second
        wide_first = wide_first.to(first.dtype).to(tl.float32)
        wide_second = wide_second.to(first.dtype).to(tl.float32)
    rotated_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    rotated_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    tl.store(x_ptr + offsets, rotated_first, mask=inside)
    tl.store(x_ptr + offsets + HALF, rotated_second, mask=inside)
    return rotated_first, rotated_second


@triton.jit
def _rotate_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    positions_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    table_stride,
    block_stride,
    head_stride,
    token_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    Q_TILES: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One token and one tile of heads: first the tiles of queries, then those of keys and values."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    half = tl.arange(0, HALF)
    angle = tl.load(positions_ptr + row) * table_stride + half
    cos = tl.load(cos_ptr + angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle).to(tl.float32)[None, :]
    heads = tile * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    if tile < Q_TILES:
        offsets = row * q_row_stride + heads * q_head_stride + half[None, :]
        _rotate_heads(
            q_ptr,
            offsets,
            heads < NUM_HEADS,
            cos,
            sin,
            half,
            query_norm_ptr,
            eps,
            HALF=HALF,
            HAS_NORM=HAS_NORM,
        )
    else:
        heads -= Q_TILES * HEADS_TILE
        inside = heads < NUM_KV_HEADS
        offsets = row * k_row_stride + heads * k_head_stride + half[None, :]
        first, second = _rotate_heads(
            k_ptr, offsets, inside, cos, sin, half, key_norm_ptr, eps, HALF=HALF, HAS_NORM=HAS_NORM
        )
        slot = tl.load(slots_ptr + row)
        place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
        cells = place + heads * head_stride + half[None, :]
        tl.store(key_cache_ptr + cells, first.to(key_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(key_cache_ptr + cells + HALF, second.to(key_cache_ptr.dtype.element_ty), mask=inside)
        v_offsets = row * v_row_stride + heads * v_head_stride + half[None, :]
        v_first = tl.load(v_ptr + v_offsets, mask=inside, other=0.0)
        v_second = tl.load(v_ptr + v_offsets + HALF, mask=inside, other=0.0)
        tl.store(value_cache_ptr + cells, v_first.to(value_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(value_cache_ptr + cells + HALF, v_second.to(value_cache_ptr.dtype.element_ty), mask=inside)


def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation, target: KvTarget
) -> None:
    """See `operations.plain_rotate_and_write`."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == v.stride(2) == target.keys.stride(3) == 1
    assert target.keys.stride() == target.values.stride()
    assert rotation.cos.shape[1] * 2 == head_dim
    assert rotation.cos.stride() == rotation.sin.stride()
    assert (rotation.query_norm is None) == (rotation.key_norm is None)
    q_tiles = triton.cdiv(num_heads, _HEADS_TILE)
    _rotate_kernel[(rows, q_tiles + triton.cdiv(num_kv_heads, _HEADS_TILE))](
        q,
        k,
        v,
        rotation.cos,
        rotation.sin,
        q if rotation.query_norm is None else rotation.query_norm,
        k if rotation.key_norm is None else rotation.key_norm,
        positions,
        target.slots,
        target.keys,
        target.values,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        rotation.cos.stride(0),
        *target.keys.stride()[:3],
        rotation.eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        Q_TILES=q_tiles,
        HEADS_TILE=_HEADS_TILE,
        HALF=head_dim // 2,
        BLOCK_SIZE=target.keys.shape[2],
        HAS_NORM=rotation.query_norm is not None,
        num_warps=2,
    )
