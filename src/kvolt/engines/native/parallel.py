"""Tensor parallelism: a model's heads and columns shared by several processes.

Every rank holds its share of the weights and of the KV, and runs the same steps. Rank 0 leads: it schedules,
samples and serves; the others follow what it broadcasts. Between them only sums travel: one after attention
and one after the MLP of each layer.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kvolt.core.errors import ConfigError
from kvolt.models.config import ModelConfig

_PATIENCE = timedelta(minutes=10)
"""Of a sum: the first one waits until the slowest rank has read its weights."""


class Group(Protocol):
    """The ranks of one model, seen from one of them."""

    rank: int
    degree: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place where it can be."""
        ...


class Solo:
    """One process has it all."""

    rank = 0
    degree = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class TorchGroup:
    """Over torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, rank: int, degree: int, address: str, device: torch.device) -> None:
        self.rank = rank
        self.degree = degree
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=address,
            rank=rank,
            world_size=degree,
            timeout=_PATIENCE,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def close(self) -> None:
        dist.destroy_process_group()


def check_degree(config: ModelConfig, degree: int) -> None:
    """ConfigError where the model's heads or columns cannot be shared evenly."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        count = getattr(config, name)
        if count % degree:
            raise ConfigError(
                f"tensor parallelism over {degree} ranks cannot share the model's {name} of {count}",
                key="args.tensor_parallel",
                remedy=f"choose a number that divides {count}",
            )


def share(x: Tensor, dim: int, rank: int, degree: int) -> Tensor:
    """A rank's part of a dimension."""
    if degree == 1:
        return x
    size = x.shape[dim] // degree
    return x.narrow(dim, rank * size, size)
