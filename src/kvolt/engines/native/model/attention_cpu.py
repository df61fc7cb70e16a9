"""Attention on the CPU: C kernels that read the slab in place, or plain torch.

With kernels, a layer is one call for rotation, KV writes and all decodes; data that depends only on the step is
prepared once for all layers. Without them, the blocks of all decodes are gathered, padded to the longest and masked.
Prefill chunks use torch's attention one by one in both cases; a chunk that is its whole context is not gathered.
Inputs that the kernels do not support (see `PagedAttention.fits`) use plain torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvolt.engines.native.batch import Batch
from kvolt.engines.native.kernels import cpu_kernels
from kvolt.engines.native.kernels.cpu_kernels import NARROW, CpuKernels, is_dense
from kvolt.engines.native.kernels.inputs import KvTarget, Rotation
from kvolt.engines.native.kernels.operations import plain_rotate_and_write
from kvolt.engines.native.slab import KvSlab

_SEQUENCES_PER_THREAD = 4
"""With fewer, contexts are split over threads, so that one long context does not delay the others."""


@dataclass(slots=True)
class _Chunk:
    """A prefill chunk: its rows and, unless it is its whole context, a mask."""

    number: int
    first: int
    last: int
    context: int
    mask: Tensor | None = None


@dataclass(slots=True)
class _Step:
    """Data shared by all layers of a step."""

    batch: Batch
    chunks: list[_Chunk]
    paged: PagedStep | None
    plain: tuple[Tensor, Tensor] | None = None
    """Blocks and mask of the decodes, if a layer uses plain torch."""


class CpuAttention:
    """The attention backend of a host slab."""

    def __init__(self, slab: KvSlab, num_heads: int, scale: float) -> None:
        self._num_kv_heads = slab.shape.num_kv_heads
        self._group_size = num_heads // slab.shape.num_kv_heads
        self._block_size = slab.shape.block_size
        self._scale = scale
        self._heads = torch.arange(self._num_kv_heads)[None, :, None]
        self._views = [slab.layer(number) for number in range(slab.shape.num_layers)]
        self._step: _Step | None = None
        kernels = cpu_kernels.shared()
        self._paged: PagedAttention | None = None
        if kernels is not None and PagedAttention.fits(kernels, slab, num_heads):
            self._paged = PagedAttention(kernels, slab, num_heads, scale)

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: Batch
    ) -> Tensor:
        step = self._step
        if step is None or step.batch is not batch:
            step = self._step = self._prepare(batch, rotation, q.dtype)
        out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype)
        paged = self._paged
        if paged is not None and step.paged is not None and paged.supports(layer, q, k, v, rotation):
            paged.attend(layer, q, k, v, step.paged, out)
        else:
            self._plain_attend(layer, q, k, v, rotation, step, out)
        for chunk in step.chunks:
            rows = slice(chunk.first, chunk.last)
            attended = self._prefill(layer, chunk, q[rows], k[rows], v[rows], step)
            if chunk.last - chunk.first == batch.num_tokens:
                return attended
            out[rows] = attended
        return out

    def _prefill(self, layer: int, chunk: _Chunk, q: Tensor, k: Tensor, v: Tensor, step: _Step) -> Tensor:
        if chunk.mask is None:
            context_k, context_v = k.transpose(0, 1), v.transpose(0, 1)
        else:
            context_k, context_v = self._context(layer, chunk, step)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            context_k.unsqueeze(0),
            context_v.unsqueeze(0),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
            enable_gqa=self._group_size > 1,
        )
        return attended.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)

    def _context(self, layer: int, chunk: _Chunk, step: _Step) -> tuple[Tensor, Tensor]:
        """Keys and values of a chunk and all tokens before it: [kv_heads, context, head_dim]."""
        if self._paged is not None and step.paged is not None:
            return self._paged.context(layer, chunk.number, chunk.context, step.paged)
        count = -(-chunk.context // self._block_size)
        blocks = step.batch.block_tables[chunk.number, :count].long()
        keys, values = (view[blocks].transpose(0, 1).flatten(1, 2) for view in self._views[layer])
        return keys[:, : chunk.context], values[:, : chunk.context]

    def _prepare(self, batch: Batch, rotation: Rotation, dtype: torch.dtype) -> _Step:
        chunks = []
        for number in range(batch.num_decodes, batch.num_sequences):
            first, last = batch.query_starts[number], batch.query_starts[number + 1]
            chunk = _Chunk(number, first, last, batch.context_lens[number])
            count = last - first
            if count < chunk.context:
                hidden = torch.full((count, chunk.context), float("-inf"), dtype=dtype)
                chunk.mask = hidden.triu_(chunk.context - count + 1)
            chunks.append(chunk)
        return _Step(batch, chunks, None if self._paged is None else self._paged.step(batch, rotation))

    def _plain_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, step: _Step, out: Tensor
    ) -> None:
        """Like `PagedAttention.attend` in plain torch, for any inputs."""
        batch = step.batch
        keys, values = self._views[layer]
        plain_rotate_and_write(q, k, v, batch.positions, rotation, KvTarget(keys, values, batch.slots))
        count = batch.num_decodes
        if count:
            if step.plain is None:
                step.plain = self._plain_decodes(batch, q.dtype)
            blocks, mask = step.plain
            # The query heads that share a KV head take the dimension of query positions.
            shape = (count, self._num_kv_heads, -1, q.shape[2])
            attended = F.scaled_dot_product_attention(
                q[:count].reshape(shape),
                keys[blocks, self._heads].view(shape),
                values[blocks, self._heads].view(shape),
                attn_mask=mask,
                scale=self._scale,
            )
            out[:count] = attended.reshape(count, -1)

    def _plain_decodes(self, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        count = batch.num_decodes
        lens = batch.context_lens_t[:count].long()
        num_blocks = -(-max(batch.context_lens[:count]) // self._block_size)
        positions = torch.arange(num_blocks * self._block_size)
        hidden = positions[None, :] >= lens[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        return batch.block_tables[:count, :num_blocks].long()[:, None, :], mask[:, None, None, :]


@dataclass(slots=True)
class PagedStep:
    """The C kernels' step structure, and the memory it points to."""

    address: int
    owners: tuple[object, ...]
    tables: Tensor
    partials: Tensor | None
    """Partial results of contexts that are split over threads."""


@dataclass(slots=True)
class _PagedLayer:
    address: int
    owner: cpu_kernels.Layer
    rotation: Rotation


class PagedAttention:
    """The C kernels bound to a slab. Static conditions are checked once."""

    def __init__(self, kernels: CpuKernels, slab: KvSlab, num_heads: int, scale: float) -> None:
        shape = slab.shape
        self._kernels = kernels
        self._dtype = slab.tensor.dtype
        self._slab = slab
        itemsize = slab.tensor.element_size()
        keys, _ = slab.layer(0)
        block_stride, head_stride, token_stride, _ = (stride * itemsize for stride in keys.stride())
        self._shape = cpu_kernels.Shape(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            block_stride=block_stride,
            head_stride=head_stride,
            token_stride=token_stride,
            head_dim=shape.head_dim,
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            narrow=NARROW[self._dtype],
            scale=scale,
        )
        self._shape_address = ctypes.addressof(self._shape)
        self._layers: list[_PagedLayer | None] = [None] * shape.num_layers
        self._row_values = (num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self._itemsize = itemsize

    @staticmethod
    def fits(kernels: CpuKernels, slab: KvSlab, num_heads: int) -> bool:
        shape, tensor = slab.shape, slab.tensor
        return (
            tensor.is_cpu
            and tensor.dtype in NARROW
            and tensor.is_contiguous()
            and kernels.fits_heads(shape.head_dim)
            and num_heads % shape.num_kv_heads == 0
        )

    def step(self, batch: Batch, rotation: Rotation) -> PagedStep:
        """Prepare a step. IndexError if the batch exceeds the slab or rotation tables."""
        shape, kernels, count = self._shape, self._kernels, batch.num_decodes
        positions, slots = batch.positions.contiguous(), batch.slots.contiguous()
        tables, lens = batch.block_tables.int().contiguous(), batch.context_lens_t.int().contiguous()
        read = sum(batch.context_lens[:count]) * shape.num_kv_heads * shape.head_dim * 2
        threads = kernels.threads_for(read)
        max_parts = -(-max(batch.context_lens[:count], default=0) // kernels.part)
        partials: Tensor | None = None
        if threads > 1 and max_parts > 1 and count < _SEQUENCES_PER_THREAD * threads:
            partials = torch.empty(count * max_parts * shape.num_heads * (shape.head_dim + 2))
        step = cpu_kernels.Step(
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            num_decodes=count,
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            tables=tables.data_ptr(),
            context_lens=lens.data_ptr(),
            table_width=tables.shape[1],
            partials=None if partials is None else partials.data_ptr(),
            max_parts=max_parts,
            rotate_threads=kernels.threads_for(batch.num_tokens * self._row_values),
            attend_threads=threads,
        )
        shape.num_positions = rotation.cos.shape[0]
        address = ctypes.addressof(step)
        if kernels.check(self._shape_address, address):
            raise IndexError("a step exceeds its KV blocks or positions")
        return PagedStep(address, (step, lens, positions, slots), tables, partials)

    def supports(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> bool:
        bound = self._layers[layer]
        if bound is None or bound.rotation is not rotation:
            self._layers[layer] = self._bind(layer, rotation)
        head_dim = self._shape.head_dim
        row = q.stride(0)
        for x in (q, k, v):
            row_stride, head_stride, stride = x.stride()
            # The stride of a dimension of size 1 is arbitrary.
            if (row_stride != row and x.shape[0] > 1) or (head_stride != head_dim and x.shape[1] > 1):
                return False
            if stride != 1 or x.dtype is not self._dtype:
                return False
        return bool(rotation.cos.shape[0] == self._shape.num_positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: PagedStep, out: Tensor) -> None:
        """Rotate q and k in place, write k and v, and compute the decodes' attention, for inputs that it `supports`."""
        bound = self._layers[layer]
        assert bound is not None, "see supports"
        self._kernels.attend(
            self._shape_address,
            step.address,
            bound.address,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0) * self._itemsize,
            out.data_ptr(),
        )

    def context(self, layer: int, number: int, length: int, step: PagedStep) -> tuple[Tensor, Tensor]:
        """Contiguous keys and values of a sequence: [kv_heads, length, head_dim]."""
        shape = self._shape
        out = torch.empty((2, shape.num_kv_heads, length, shape.head_dim), dtype=self._dtype)
        table = step.tables[number].data_ptr()
        for into, view in zip(out, self._slab.layer(layer), strict=True):
            self._kernels.gather(self._shape_address, view.data_ptr(), table, length, into.data_ptr())
        return out[0], out[1]

    def _bind(self, layer: int, rotation: Rotation) -> _PagedLayer:
        keys, values = self._slab.layer(layer)
        query_norm, key_norm = rotation.query_norm, rotation.key_norm
        tables = (rotation.cos, rotation.sin)
        assert all(is_dense(table, torch.float32) for table in tables), "tables in float32"
        assert all(norm is None or is_dense(norm, self._dtype) for norm in (query_norm, key_norm)), "norms"
        bound = cpu_kernels.Layer(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cosines=rotation.cos.data_ptr(),
            sines=rotation.sin.data_ptr(),
            query_norm=None if query_norm is None else query_norm.data_ptr(),
            key_norm=None if key_norm is None else key_norm.data_ptr(),
            eps=rotation.eps,
        )
        return _PagedLayer(ctypes.addressof(bound), bound, rotation)
