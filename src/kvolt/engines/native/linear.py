"""Matrix products with weights that stay: as they are, packed for the CPU, or in eight bits.

Owns how a weight is kept for the products of a step. Packing lays a bfloat16 weight out as oneDNN's kernels read
it, once: a product of few rows is then half as dear again, since torch's own `linear` does it at every call.
Int8 is weight-only: activations stay as they are, each output column has a scale of its own. Knows nothing of
layers.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Quantize = Literal["none", "int8"]

_PACKED_ROWS = 32
"""The number of rows that a packed layout is chosen for: a decode step's. Others are possible, and nearly as fast."""

# Where oneDNN's choice of blocks is a poor one (seen with AMX and few threads): 33 rows take three quarters of the time
# of 32, and a narrow product of several hundred rows is up to twice as dear per row as one of fewer or of more. ADR 8.
_SLOW_FEW_ROWS, _QUICK_FEW_ROWS = range(17, 33), 33
_SLOW_ROWS_PER_THREAD, _QUICK_ROWS_PER_THREAD = range(161, 641), 128
_NARROW_COLUMNS = 1024

_INT8_COLUMNS, _INT8_DEPTH = 32, 64
_INT8_ROWS = 48
"""From so many rows on, the weight is widened first and the product is bfloat16's, which has AMX."""


class Projection(Protocol):
    """x [T, in] -> [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Plain:
    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class Packed:
    """bfloat16 on a CPU, through the operator that torch's own compiler uses."""

    __slots__ = ("_bias", "_is_narrow", "_operator", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._operator: Any = torch.ops.mkldnn._linear_pointwise
        self._bias = bias
        self._is_narrow = weight.shape[0] <= _NARROW_COLUMNS

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows in _SLOW_FEW_ROWS:
            return self._multiply(F.pad(x, (0, 0, 0, _QUICK_FEW_ROWS - rows)))[:rows]
        threads = torch.get_num_threads()
        if self._is_narrow and threads > 1 and rows // threads in _SLOW_ROWS_PER_THREAD:
            parts = torch.split(x, _QUICK_ROWS_PER_THREAD * threads)
            return torch.cat([self._multiply(part) for part in parts])
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        product: Tensor = self._operator(x, self._weight, self._bias, "none", [], "")
        return product


class Int8:
    """One signed byte per weight, symmetric. Activations in bfloat16, CPU only."""

    __slots__ = ("_bias", "_scale", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        largest = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-8)
        scale = largest / 127.0
        self._weight = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8).contiguous()
        self._scale = scale.squeeze(1).to(torch.bfloat16)
        self._bias = bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """The kernel reads whole tiles and does not look where the weight ends."""
        return weight.shape[0] % _INT8_COLUMNS == 0 and weight.shape[1] % _INT8_DEPTH == 0

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= _INT8_ROWS:
            return F.linear(x, self._weight * self._scale[:, None], self._bias)
        out = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        return out if self._bias is None else out + self._bias


def projection(weight: Tensor, bias: Tensor | None, quantize: Quantize = "none") -> Projection:
    """The best way to multiply with this weight."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return Plain(weight, bias)
    if quantize == "int8" and Int8.fits(weight):
        return Int8(weight, bias)
    return Packed(weight, bias) if _can_pack() else Plain(weight, bias)


def _can_pack() -> bool:
    """An operator without a public name, so it may go away; and one that not every CPU has a kernel for."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if _has_probe() else False


def _has_probe() -> bool:
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
