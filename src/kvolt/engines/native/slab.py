"""KvSlab: memory of all KV blocks of one rank.

    tensor: [num_blocks, num_layers, 2 (k, v), num_kv_heads, block_size, head_dim]

A block is contiguous and contains all layers, so it is transferred as a single copy, as is a run of adjacent blocks.
Layers are strided views; kernels read the last three dimensions of a view at a time, which are contiguous.

On the host the memory is a memfd: another process maps the same pages by its descriptor, and no name can be left
behind. On a device it is one allocation, which CUDA shares by an IPC handle. Does not know the content of blocks.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from kvolt.models.config import ModelConfig
    from kvolt.transfer.memory.device_memory import DeviceHandle

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYOUT = "block-layer-kv-head-token"
"""Name of the dimension order, compared before transfers."""


class SlabShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions and data type of a slab."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    @classmethod
    def of(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: str, degree: int = 1
    ) -> SlabShape:
        """The shape of one of `degree` ranks."""
        return cls(
            num_blocks=num_blocks,
            num_layers=config.num_layers,
            num_kv_heads=max(config.num_kv_heads // degree, 1),
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=dtype,
        )

    @property
    def dims(self) -> tuple[int, ...]:
        return (self.num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.dims[1:]) * DTYPES[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class KvSlab:
    """See the module."""

    def __init__(self, shape: SlabShape, device: str = "cpu", descriptor: int | None = None) -> None:
        """`descriptor`: a memfd of `shape.num_bytes`, on the host only; it may be closed afterwards."""
        self.shape = shape
        self._map: mmap.mmap | None = None
        dtype = DTYPES[shape.dtype]
        if descriptor is not None:
            self._map = mmap.mmap(descriptor, shape.num_bytes)
            flat = torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape.dims))
            self.tensor = flat.view(shape.dims)
        else:
            self.tensor = torch.zeros(shape.dims, dtype=dtype, device=device)

    def device_handle(self) -> DeviceHandle | None:
        """Handle by which another process opens device memory; None on the host."""
        if not self.tensor.is_cuda:
            return None
        from kvolt.transfer.cuda.memory import (
            handle_of,  # requires Triton, which may be missing without a GPU
        )

        return handle_of(self.tensor)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: [num_blocks, num_kv_heads, block_size, head_dim] each."""
        return self.tensor[:, number, 0], self.tensor[:, number, 1]

    def read(self, block: int) -> bytes:
        """A copy of a block's bytes."""
        return self.tensor[block].flatten().view(torch.uint8).cpu().numpy().tobytes()

    def write(self, block: int, data: bytes) -> None:
        """Fill a block. The caller has checked the length."""
        values = torch.frombuffer(bytearray(data), dtype=DTYPES[self.shape.dtype])
        self.tensor[block].copy_(values.view(self.shape.dims[1:]))
