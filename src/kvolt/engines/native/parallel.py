"""Tensor parallelism: the heads and columns of a model are split over several processes.

Every rank has its share of the weights and the KV and runs the same steps. Rank 0 schedules, samples and serves; the
others run the batches that it broadcasts. Ranks exchange only sums: one after attention and one after the MLP of each
layer.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kvolt.core.errors import ConfigError
from kvolt.models.config import ModelConfig

_TIMEOUT = timedelta(minutes=10)
"""Timeout of a collective: the first one waits until the slowest rank has loaded its weights."""


class RankGroup(Protocol):
    """The group of a model's ranks, as seen by one of them."""

    rank: int
    degree: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place if possible."""
        ...


class Solo:
    """A group of one rank."""

    rank = 0
    degree = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class TorchGroup:
    """A torch.distributed group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, rank: int, degree: int, address: str, device: torch.device) -> None:
        self.rank = rank
        self.degree = degree
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=address,
            rank=rank,
            world_size=degree,
            timeout=_TIMEOUT,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def close(self) -> None:
        dist.destroy_process_group()


def check_degree(config: ModelConfig, degree: int) -> None:
    """ConfigError if the model's heads or columns cannot be split evenly."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        count = getattr(config, name)
        if count % degree:
            raise ConfigError(
                f"the model's {name} of {count} cannot be split over {degree} ranks",
                key="args.tensor_parallel",
                remedy=f"set tensor_parallel to a divisor of {count}",
            )


def share(x: Tensor, dim: int, rank: int, degree: int) -> Tensor:
    """A rank's part of a tensor along a dimension."""
    if degree == 1:
        return x
    size = x.shape[dim] // degree
    return x.narrow(dim, rank * size, size)
