"""Operations between a decoder's matrix products, each as one kernel: Triton on a GPU, C on a CPU.

Owns their definitions: the plain forms specify the results of the kernels, and run if there is no kernel. Must not
know models, batches or schedules. Imports Triton only for CUDA tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvolt.core.errors import ConfigError
from kvolt.engines.native.kernels import cpu_kernels
from kvolt.engines.native.kernels.inputs import KvTarget, Rotation


def check_gpu_shape(head_dim: int, block_size: int) -> None:
    """ConfigError if the Triton kernels do not support these sizes."""
    if not (16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0):
        raise ConfigError(
            f"the GPU kernels require a head size that is a power of two from 16 to 256, not {head_dim}",
            key="model",
            remedy="use device=cpu, or another model",
        )
    if not (block_size >= 16 and block_size & (block_size - 1) == 0):
        raise ConfigError(
            f"the GPU kernels require a block size that is a power of two of at least 16, not {block_size}",
            key="args.block_size",
            remedy="leave block_size at 16",
        )


def add_rmsnorm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise it; returns (normed, residual). Modifies `residual` if given."""
    if x.is_cuda:
        from kvolt.engines.native.kernels import triton_fused

        return triton_fused.add_rmsnorm(x, residual, weight, eps)
    kernels = cpu_kernels.shared()
    if kernels is not None and (result := kernels.add_rmsnorm(x, residual, weight, eps)) is not None:
        return result
    return plain_add_rmsnorm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for a [T, 2 * width] product, with gate in the first half."""
    if gate_up.is_cuda:
        from kvolt.engines.native.kernels import triton_fused

        return triton_fused.silu_mul(gate_up)
    kernels = cpu_kernels.shared()
    if kernels is not None and (result := kernels.silu_mul(gate_up)) is not None:
        return result
    return plain_silu_mul(gate_up)


def plain_rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in float32, rounded to the input's type before applying the weight, as in the reference
    implementations."""
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


def plain_rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation, target: KvTarget
) -> None:
    """Normalise and rotate q [T, heads, hd] and k [T, kv_heads, hd] in place, and write k and v to their slots."""
    cos, sin = rotation.cos[positions].float().unsqueeze(1), rotation.sin[positions].float().unsqueeze(1)
    for heads, norm in ((q, rotation.query_norm), (k, rotation.key_norm)):
        normed = heads if norm is None else plain_rmsnorm(heads, norm, rotation.eps)
        first, second = normed.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    block_size = target.keys.shape[2]
    block, offset = target.slots // block_size, target.slots % block_size
    target.keys[block, :, offset] = k
    target.values[block, :, offset] = v
