"""Attention on a GPU: writes a step's keys and values to the slab, then attends decodes and prefill chunks.

Owns the choice of kernels. Decodes read the slab through the paged kernel, whose grid depends on the batch
alone, so a step of decodes can be captured. Prefill chunks go one of two ways, by `prefill`:

    paged   one Triton launch for all chunks, straight from the slab
    sdpa    torch's flash attention, sequence by sequence; a context in the cache is gathered first

Must not know models, schedules or sampling.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from kvolt.core.errors import Unsupported
from kvolt.engines.native.kernels import triton_fused
from kvolt.engines.native.kernels.operations import KvTarget, Rotation
from kvolt.engines.native.kernels.triton_decode import PagedContext, decode_attention
from kvolt.engines.native.kernels.triton_prefill import Chunks, prefill_attention

if TYPE_CHECKING:
    from kvolt.engines.native.batch import Batch
    from kvolt.engines.native.slab import KvSlab

Prefill = Literal["paged", "sdpa"]


class CudaAttention:
    """The attention backend of a device slab."""

    def __init__(self, slab: KvSlab, num_heads: int, scale: float, prefill: Prefill = "paged") -> None:
        self._layers = [slab.layer(number) for number in range(slab.shape.num_layers)]
        num_kv_heads, block_size, head_dim = self._layers[0][0].shape[1:]
        if not (16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0):
            raise Unsupported(
                f"the GPU kernels need a head size of 16 to 256, a power of two, not {head_dim}"
            )
        if not (block_size >= 16 and block_size & (block_size - 1) == 0):
            raise Unsupported(
                f"the GPU kernels need a block size of 16 or more, a power of two, not {block_size}"
            )
        if num_heads % num_kv_heads:
            raise Unsupported(f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly")
        self._scale = scale
        self._prefill = prefill
        self._chunks_of: tuple[Batch, Chunks] | None = None

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: Batch
    ) -> Tensor:
        """q [T, heads, hd], k and v [T, kv_heads, hd] -> [T, heads * hd]; q and k are turned in place."""
        keys, values = self._layers[layer]
        target = KvTarget(keys, values, batch.slots)
        triton_fused.rotate_and_write(q, k, v, batch.positions, rotation, target)
        return self._attend(layer, q, k, v, batch)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        keys, values = self._layers[layer]
        rows, decodes = q.shape[0], batch.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if decodes:
            context = PagedContext(keys, values, batch.block_tables[:decodes], batch.context_lens_t[:decodes])
            decode_attention(q[:decodes], context, self._scale, out=out[:decodes])
        if rows > decodes and self._prefill == "paged":
            context = PagedContext(keys, values, batch.block_tables[decodes:], batch.context_lens_t[decodes:])
            prefill_attention(q, context, self._chunks(batch, q.device), self._scale, out=out)
        elif rows > decodes:
            for sequence in range(decodes, len(batch.context_lens)):
                self._attend_chunk(sequence, layer, q, k, v, batch, out)
        return out.view(rows, -1)

    def _chunks(self, batch: Batch, device: torch.device) -> Chunks:
        """Of a step, once for all its layers."""
        if self._chunks_of is None or self._chunks_of[0] is not batch:
            starts = batch.query_starts[batch.num_decodes :]
            host = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
            longest = max(end - start for start, end in pairwise(starts))
            self._chunks_of = (batch, Chunks(host.to(device, non_blocking=True), longest))
        return self._chunks_of[1]

    def _attend_chunk(
        self, sequence: int, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, out: Tensor
    ) -> None:
        start, end = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        context = batch.context_lens[sequence]
        if end - start == context:
            chunk_k, chunk_v = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
        else:
            blocks = batch.block_tables[sequence]
            chunk_k, chunk_v = (_gathered(view, blocks, context) for view in self._layers[layer])
        out[start:end] = _causal(q[start:end].transpose(0, 1), chunk_k, chunk_v, self._scale).transpose(0, 1)


def _gathered(view: Tensor, blocks: Tensor, context: int) -> Tensor:
    """The first `context` tokens of a block table, contiguous: [kv_heads, context, hd]."""
    block_size = view.shape[2]
    used = blocks[: -(-context // block_size)].long()
    return view[used].transpose(0, 1).flatten(1, 2)[:, :context]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries of a context: q [heads, L, hd], k and v [kv_heads, context, hd]."""
    queries, context = q.shape[1], k.shape[1]
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if queries == context:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    elif q.is_cuda and q.dtype != torch.float32:
        mask = causal_lower_right(queries, context)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    else:
        seen = torch.ones((queries, context), dtype=torch.bool, device=q.device).tril(context - queries)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out.squeeze(0)
