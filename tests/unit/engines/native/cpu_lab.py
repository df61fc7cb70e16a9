"""Steps of random sequences for the CPU's attention, and what they should give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvolt.engines.native.batch import Batch
from kvolt.engines.native.kernels import cpu_kernels, operations
from kvolt.engines.native.kernels.cpu_kernels import CpuKernels
from kvolt.engines.native.kernels.inputs import KvTarget, Rotation
from kvolt.engines.native.model.attention_cpu import CpuAttention
from kvolt.engines.native.slab import KvSlab, SlabShape

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Relative: one unit of the last place of a bfloat16, since values may be rounded to either side."""
TYPES = list(TOLERANCE)


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """For property tests, which may not share a fixture between examples."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many, and all of them used for however little."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with patched(cpu_kernels, "_THREADED_VALUES", 0):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_kernels() -> Iterator[None]:
    with patched(cpu_kernels, "shared", lambda: None):
        yield


def needed() -> CpuKernels:
    """The test is skipped where they cannot be built."""
    found = cpu_kernels.shared()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=bound, atol=bound / 10, equal_nan=True)


def rounded_alike(found: Tensor, expected: Tensor) -> None:
    """In bfloat16: where each step is rounded as it should be, hardly a value differs."""
    if found.dtype is torch.bfloat16 and found.numel() > 1000:
        same = (found == expected) | (found.isnan() & expected.isnan())
        assert same.float().mean() > 0.99


@dataclass
class Shape:
    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 3
    ratio: int = 3
    head_dim: int = 64
    block_size: int = 16
    qk_norm: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.ratio

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Case:
    """A step of sequences in random blocks: `contexts` decode, then chunks of (tokens, context)."""

    def __init__(self, shape: Shape, contexts: Sequence[int], chunks: Sequence[tuple[int, int]] = ()) -> None:
        self.shape = shape
        works = [(1, length) for length in contexts] + list(chunks)
        counts = [-(-length // shape.block_size) for _, length in works]
        self.num_blocks = sum(counts) + 1
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(5)).tolist()
        tables = torch.zeros((len(works), max(counts)), dtype=torch.int32)
        slots, positions, starts = [], [], [0]
        for row, (count, length) in enumerate(works):
            blocks = [order.pop() for _ in range(counts[row])]
            tables[row, : counts[row]] = torch.tensor(blocks)
            for position in range(length - count, length):
                slots.append(
                    blocks[position // shape.block_size] * shape.block_size + position % shape.block_size
                )
                positions.append(position)
            starts.append(starts[-1] + count)
        lens = [length for _, length in works]
        self.batch = Batch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            num_decodes=len(contexts),
            query_starts=starts,
            context_lens=lens,
            context_lens_t=torch.tensor(lens, dtype=torch.int32),
            block_tables=tables,
            logit_rows=torch.arange(starts[-1]),
        )
        self.qkv = normal(starts[-1], shape.width, dtype=shape.dtype, seed=1)
        angles = normal(max(lens) + 3, shape.head_dim // 2, seed=2) * 3
        norms = [normal(shape.head_dim, dtype=shape.dtype, seed=seed) for seed in (3, 4)]
        query_norm, key_norm = norms if shape.qk_norm else (None, None)
        self.rotation = Rotation(angles.cos(), angles.sin(), query_norm, key_norm, 1e-5)
        self.cached = self._cached()

    def slab(self, unwritten: float) -> KvSlab:
        """What came before this step lies in it; elsewhere is `unwritten`."""
        shape = self.shape
        slab = KvSlab(
            SlabShape(
                num_blocks=self.num_blocks,
                num_layers=2,
                num_kv_heads=shape.num_kv_heads,
                block_size=shape.block_size,
                head_dim=shape.head_dim,
                dtype=NAMES[shape.dtype],
            )
        )
        slab.tensor.copy_(torch.where(self.cached.isnan(), unwritten, self.cached))
        return slab

    def _cached(self) -> Tensor:
        shape, batch = self.shape, self.batch
        size = (self.num_blocks, 2, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        cached = torch.full(size, float("nan"), dtype=shape.dtype)
        values = normal(*size, dtype=shape.dtype, seed=6)
        for row, length in enumerate(batch.context_lens):
            for position in range(length - (batch.query_starts[row + 1] - batch.query_starts[row])):
                block, inside = divmod(position, shape.block_size)
                at = int(batch.block_tables[row, block])
                cached[at, 1, :, :, inside] = values[at, 1, :, :, inside]
        return cached

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        shape, qkv = self.shape, self.qkv.clone()
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        parts = qkv.split([size * shape.head_dim for size in sizes], dim=1)
        q, k, v = (part.view(len(qkv), -1, shape.head_dim) for part in parts)
        return q, k, v

    def run(self, slab: KvSlab, layer: int = 1) -> Tensor:
        attention = CpuAttention(slab, self.shape.num_heads, self.shape.head_dim**-0.5)
        return attention.rotate_and_attend(layer, *self.heads(), self.rotation, self.batch)

    def expected(self) -> tuple[Tensor, KvSlab]:
        """Query by query, in float64 from what is rounded to the slab's type; and the slab after it."""
        shape, batch = self.shape, self.batch
        slab = self.slab(float("nan"))
        keys, values = slab.layer(1)
        q, k, v = self.heads()
        target = KvTarget(keys, values, batch.slots)
        operations.plain_rotate_and_write(q, k, v, batch.positions, self.rotation, target)
        out = torch.empty((len(q), shape.num_heads, shape.head_dim), dtype=torch.float64)
        for row, table in enumerate(batch.block_tables):
            context_k, context_v = (
                view[table.long()].transpose(1, 2).flatten(0, 1).double() for view in (keys, values)
            )
            for at in range(batch.query_starts[row], batch.query_starts[row + 1]):
                seen = int(batch.positions[at]) + 1
                for head in range(shape.num_heads):
                    past_k, past_v = (x[:seen, head // shape.ratio] for x in (context_k, context_v))
                    scores = past_k @ q[at, head].double() * shape.head_dim**-0.5
                    out[at, head] = scores.softmax(0) @ past_v
        return out.flatten(1), slab
