"""Limits of the device: memory bandwidth and matrix throughput."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.engine.gpu_bench import Bench


def limits(bench: Bench) -> dict[str, Any]:
    rates = {name: _read_rate(bench, name) for name in ("copy", "sum", "matvec")}
    products = {}
    for full in ((8192, 4096, 14336), (8192, 14336, 4096), (2048, 4096, 14336)):
        m, k, n = (size // 64 if bench.is_smoke else size for size in full)
        products[f"{m}x{k}x{n}"] = _product_rate(bench, m, k, n)
    return {
        "memory_gbps": {name: rate / 1e9 for name, rate in rates.items()},
        "bandwidth": max(rates.values()),
        "matmul_tflops": {name: rate / 1e12 for name, rate in products.items()},
        "matmul": max(products.values()),
    }


def _read_rate(bench: Bench, how: str) -> float:
    num_bytes = 2**22 if bench.is_smoke else 2**33
    if how == "matvec":
        width = 256 if bench.is_smoke else 8192
        matrix = torch.randn(num_bytes // 2 // width, width, device=bench.device).to(bench.dtype)
        vector = torch.randn(width, device=bench.device).to(bench.dtype)
        time = bench.seconds(lambda: torch.mv(matrix, vector))
        return matrix.numel() * matrix.element_size() / time
    source = torch.randn(num_bytes // 4, device=bench.device)
    if how == "sum":
        return num_bytes / bench.seconds(source.sum)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.seconds(lambda: target.copy_(source))


def _product_rate(bench: Bench, m: int, k: int, n: int) -> float:
    x = torch.randn(m, k, device=bench.device).to(bench.dtype)
    weight = torch.randn(n, k, device=bench.device).to(bench.dtype) * 0.02
    return 2.0 * m * k * n / bench.seconds(lambda: torch.nn.functional.linear(x, weight), repeat=30)
