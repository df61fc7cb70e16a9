"""Inputs of the rotation kernels, in Triton, C and plain torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of queries and keys: tables by position, and the norms that some models apply before."""

    cos: Tensor
    """[positions, head_dim // 2]; both halves of a head use the same angles."""
    sin: Tensor
    query_norm: Tensor | None = None
    """[head_dim], or None for models that do not normalise heads (all but Qwen3)."""
    key_norm: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class KvTarget:
    """Destination of a layer's keys and values: views [blocks, kv_heads, block_size, head_dim] and a slot per token."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    """[T] int64: block * block_size + offset."""
