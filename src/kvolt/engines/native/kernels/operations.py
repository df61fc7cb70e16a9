"""The small operations between a decoder's matrix products: one kernel each, Triton's on a GPU, C on a CPU.

Owns their definition: the plain form says what the fused forms must compute, and runs where there is none. Must
not know models, batches or schedules, and does not import Triton until it meets a CUDA tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvolt.core.errors import ConfigError
from kvolt.engines.native.kernels import cpu_kernels


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys are turned: tables by position, and the norms some models apply before."""

    cos: Tensor
    """[positions, head_dim // 2]; the two halves of a head turn by the same angles."""
    sin: Tensor
    query_norm: Tensor | None = None
    """[head_dim], or None for models that do not normalise heads (all but Qwen3)."""
    key_norm: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class KvTarget:
    """Where a layer's keys and values go: views [blocks, kv_heads, block_size, head_dim] and a slot a token."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    """[T] int64: block * block_size + offset."""


def check_gpu_shape(head_dim: int, block_size: int) -> None:
    """What the Triton kernels can take; ConfigError for what they cannot."""
    if not (16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0):
        raise ConfigError(
            f"the GPU kernels need a head size of 16 to 256, a power of two, and this model's is {head_dim}",
            key="model",
            remedy="run it with device=cpu, or choose another model",
        )
    if not (block_size >= 16 and block_size & (block_size - 1) == 0):
        raise ConfigError(
            f"the GPU kernels need a block size of 16 or more, a power of two, not {block_size}",
            key="args.block_size",
            remedy="leave block_size at 16",
        )


def add_rmsnorm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, residual): the residual stream with x added, and its norm. Writes into `residual` if given."""
    if x.is_cuda:
        from kvolt.engines.native.kernels import triton_fused

        return triton_fused.add_rmsnorm(x, residual, weight, eps)
    native = cpu_kernels.shared()
    if native is not None and (found := native.add_rmsnorm(x, residual, weight, eps)) is not None:
        return found
    return plain_add_rmsnorm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of one [T, 2 * width] product; gate is the first half."""
    if gate_up.is_cuda:
        from kvolt.engines.native.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    native = cpu_kernels.shared()
    if native is not None and (found := native.silu_mul(gate_up)) is not None:
        return found
    return plain_silu_mul(gate_up)


def plain_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, rounded to the input's type before the weight is applied, as the checkpoints' own code does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def plain_add_rmsnorm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    residual = x if residual is None else residual.add_(x)
    return plain_rmsnorm(residual, weight, eps), residual


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, hd] turned by the angles of cos and sin [T, hd // 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def plain_rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation, target: KvTarget
) -> None:
    """Normalises and turns q [T, heads, hd] and k [T, kv_heads, hd] in place, writes k and v to their slots."""
    cos, sin = rotation.cos[positions], rotation.sin[positions]
    for heads, norm in ((q, rotation.query_norm), (k, rotation.key_norm)):
        normed = heads if norm is None else plain_rmsnorm(heads, norm, rotation.eps)
        heads.copy_(plain_rotate(normed, cos, sin))
    plain_write_kv(k, v, target)


def plain_write_kv(k: Tensor, v: Tensor, target: KvTarget) -> None:
    """Writes k and v [T, kv_heads, hd] to their slots."""
    block_size = target.keys.shape[2]
    block, offset = target.slots // block_size, target.slots % block_size
    target.keys[block, :, offset] = k
    target.values[block, :, offset] = v
