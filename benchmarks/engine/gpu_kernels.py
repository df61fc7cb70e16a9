"""Errors of the Triton kernels on this device."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench
from torch import Tensor

from kvolt.engines.native.kernels import operations, triton_fused
from kvolt.engines.native.kernels.triton_decode import PagedContext, decode_attention
from kvolt.engines.native.kernels.triton_prefill import Chunks, prefill_attention
from kvolt.engines.native.slab import KvSlab, SlabShape


class Paged:
    """A slab in which sequences of given lengths lie in random blocks, with random KV in all of it."""

    def __init__(self, bench: Bench, lens: list[int], dtype: torch.dtype) -> None:
        config = bench.config
        self.block_size = 16
        counts = [-(-length // self.block_size) for length in lens]
        name = str(dtype).removeprefix("torch.")
        shape = SlabShape(
            num_blocks=sum(counts) + 1,
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            block_size=self.block_size,
            head_dim=config.head_dim,
            dtype=name,
        )
        self.slab = KvSlab(shape, str(bench.device))
        self.slab.tensor.normal_()
        self.lens = lens
        order = list(range(sum(counts)))
        random.Random(1).shuffle(order)
        tables = torch.zeros((len(lens), max(counts)), dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            tables[row, :count] = torch.tensor(order[at : at + count], dtype=torch.int32)
            at += count
        self.tables = tables.to(bench.device)
        self.lens_t = torch.tensor(lens, dtype=torch.int32, device=bench.device)

    def context(self) -> PagedContext:
        return PagedContext(*self.slab.layer(0), self.tables, self.lens_t)

    def gathered(self, row: int) -> tuple[Tensor, Tensor]:
        """[kv_heads, length, hd] each."""
        blocks = self.tables[row, : -(-self.lens[row] // self.block_size)].long()
        k, v = (
            view[blocks].transpose(0, 1).flatten(1, 2)[:, : self.lens[row]] for view in self.slab.layer(0)
        )
        return k, v


def _error(out: Tensor, expected: Tensor) -> float:
    """Relative to the norm; not a number counts as infinite."""
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    return float(torch.nan_to_num(error, nan=float("inf")))


def _reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [L, heads, hd], the last L of the context. Written out, in float64."""
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    hidden = torch.ones((len(q), k.shape[1]), dtype=torch.bool, device=q.device).triu(k.shape[1] - len(q) + 1)
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def kernel_checks(bench: Bench) -> dict[str, Any]:
    """Relative error against float64: float32 must be exact to 1e-5, the others to their rounding."""
    results: dict[str, Any] = {}
    dtypes = (torch.float32, torch.float16, torch.bfloat16) if not bench.is_smoke else (torch.float32,)
    bounds = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
    for dtype in dtypes:
        parts = {
            "decode": lambda: _check_decode(bench, dtype),  # noqa: B023
            "prefill": lambda: _check_prefill(bench, dtype),  # noqa: B023
            "fused": lambda: _check_fused(bench, dtype),  # noqa: B023
        }
        for name, part in parts.items():
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            with bench.attempt(label, results):
                error = part()
                results[label] = {"error": error, "right": error <= bounds[dtype]}
    return results


def _check_decode(bench: Bench, dtype: torch.dtype) -> float:
    lens = [1, 40] if bench.is_smoke else [1, 16, 17, 1000, 4097, 333, 64, 65]
    paged = Paged(bench, lens, dtype)
    config, worst = bench.config, 0.0
    q = torch.randn(len(lens), config.num_heads, config.head_dim, device=bench.device).to(dtype)
    for splits in (4,) if bench.is_smoke else (1, 2, 8, 64):
        out = decode_attention(q, paged.context(), config.head_dim**-0.5, splits=splits)
        for row in range(len(lens)):
            expected = _reference(q[row : row + 1], *paged.gathered(row))[0]
            worst = max(worst, _error(out[row], expected))
    return worst


def _check_prefill(bench: Bench, dtype: torch.dtype) -> float:
    lens, chunks = ([20, 30], [20, 7]) if bench.is_smoke else ([700, 1500, 130, 2048], [700, 500, 1, 2048])
    paged = Paged(bench, lens, dtype)
    config, worst = bench.config, 0.0
    starts = [0, *itertools.accumulate(chunks)]
    q = torch.randn(starts[-1], config.num_heads, config.head_dim, device=bench.device).to(dtype)
    out = torch.full_like(q, float("nan"))
    table = Chunks(torch.tensor(starts, dtype=torch.int32, device=bench.device), max(chunks))
    prefill_attention(q, paged.context(), table, config.head_dim**-0.5, out=out)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        expected = _reference(q[start:end], *paged.gathered(row))
        worst = max(worst, _error(out[start:end], expected))
    return worst


def _check_fused(bench: Bench, dtype: torch.dtype) -> float:
    """Against the plain forms on the same device."""
    config, rows = bench.config, 37

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device).to(dtype)

    x, residual, weight = (
        made(rows, config.hidden_size),
        made(rows, config.hidden_size),
        made(config.hidden_size),
    )
    expected, summed = operations.plain_add_rmsnorm(x, residual.clone(), weight, 1e-5)
    normed, updated = triton_fused.add_rmsnorm(x, residual, weight, 1e-5)
    errors = [_error(normed, expected), _error(updated, summed)]
    gate_up = made(rows, 2 * config.intermediate_size)
    errors.append(_error(triton_fused.silu_mul(gate_up), operations.plain_silu_mul(gate_up)))
    paged, plain = (Paged(bench, [rows], dtype) for _ in range(2))
    plain.slab.tensor.copy_(paged.slab.tensor)
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    qkv = made(rows, sum(heads), config.head_dim)
    other = qkv.clone()
    positions = torch.arange(rows, device=bench.device)
    slots = paged.tables[0].long().repeat_interleave(16)[:rows] * 16 + positions % 16
    angles = torch.randn(rows, config.head_dim // 2, device=bench.device)
    norms = made(config.head_dim), made(config.head_dim)
    for weights in ((), norms):
        rotation = operations.Rotation(angles.cos(), angles.sin(), *weights)
        target = operations.KvTarget(*paged.slab.layer(0), slots)
        q, k, v = qkv.split(heads, dim=1)
        triton_fused.rotate_and_write(q, k, v, positions, rotation, target)
        target = operations.KvTarget(*plain.slab.layer(0), slots)
        q, k, v = other.split(heads, dim=1)
        operations.plain_rotate_and_write(q, k, v, positions, rotation, target)
        errors += [_error(qkv, other), _error(paged.slab.tensor, plain.slab.tensor)]
    return max(errors)
