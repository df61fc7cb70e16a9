"""Attention on a GPU: writes a step's keys and values to the slab, then computes decodes and prefill chunks.

Owns the choice of kernels. Decodes read the slab through the paged kernel, whose grid depends only on the batch, so
decode steps can be captured in CUDA graphs. All prefill chunks are one launch that reads the slab. Must not know
models, schedules or sampling.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvolt.engines.native.kernels import triton_fused
from kvolt.engines.native.kernels.inputs import KvTarget, Rotation
from kvolt.engines.native.kernels.operations import check_gpu_shape
from kvolt.engines.native.kernels.triton_decode import PagedContext, decode_attention
from kvolt.engines.native.kernels.triton_prefill import Chunks, prefill_attention

if TYPE_CHECKING:
    from kvolt.engines.native.batch import Batch
    from kvolt.engines.native.slab import KvSlab


class CudaAttention:
    """The attention backend of a device slab."""

    def __init__(self, slab: KvSlab, scale: float) -> None:
        self._layers = [slab.layer(number) for number in range(slab.shape.num_layers)]
        check_gpu_shape(slab.shape.head_dim, slab.shape.block_size)
        self._scale = scale
        self._chunks_of: tuple[Batch, Chunks] | None = None

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: Batch
    ) -> Tensor:
        """q [T, heads, hd], k and v [T, kv_heads, hd] -> [T, heads * hd]. Rotates q and k in place."""
        keys, values = self._layers[layer]
        target = KvTarget(keys, values, batch.slots)
        triton_fused.rotate_and_write(q, k, v, batch.positions, rotation, target)
        rows, decodes = q.shape[0], batch.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            context = PagedContext(keys, values, batch.block_tables[:decodes], batch.context_lens_t[:decodes])
            decode_attention(q[:decodes], context, self._scale, out=out[:decodes])
        if rows > decodes:
            context = PagedContext(keys, values, batch.block_tables[decodes:], batch.context_lens_t[decodes:])
            prefill_attention(q, context, self._chunks(batch, q.device), self._scale, out=out)
        return out.view(rows, -1)

    def _chunks(self, batch: Batch, device: torch.device) -> Chunks:
        """The prefill chunks of a step, computed once for all layers."""
        if self._chunks_of is None or self._chunks_of[0] is not batch:
            starts = batch.query_starts[batch.num_decodes :]
            host = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
            longest = max(end - start for start, end in pairwise(starts))
            self._chunks_of = (batch, Chunks(host.to(device, non_blocking=True), longest))
        return self._chunks_of[1]
