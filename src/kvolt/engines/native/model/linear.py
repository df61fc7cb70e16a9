"""Linear projections: plain, packed for the CPU, or with int8 weights.

Owns the storage format of weights for the products of a step. Packing reorders a bfloat16 weight once into the layout
of oneDNN's kernels; torch's own `linear` does this in every call, which makes products of few rows half as expensive
again. Int8 is weight-only: activations are unchanged, and each output column has its own scale. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Quantize = Literal["none", "int8"]

_PACKED_ROWS = 32
"""Row count that the packed layout is optimised for: a decode step. Others are possible and almost as fast."""

# Row counts for which oneDNN chooses slow blocking (seen with AMX and few threads): 33 rows take three
# quarters of the time of 32, and a narrow product of several hundred rows costs up to twice as much per row
# as smaller or larger ones (ADR 8).
_SLOW_FEW_ROWS, _FAST_FEW_ROWS = range(17, 33), 33
_SLOW_ROWS_PER_THREAD, _FAST_ROWS_PER_THREAD = range(161, 641), 128
_NARROW_COLUMNS = 1024

_INT8_COLUMNS, _INT8_DEPTH = 32, 64
_INT8_ROWS = 48
"""From this row count on, the weight is converted to bfloat16 first, whose products use AMX."""


Projection = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""


class Packed:
    """bfloat16 on a CPU, by the operator that torch's compiler uses."""

    __slots__ = ("_bias", "_is_narrow", "_operator", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._operator: Any = torch.ops.mkldnn._linear_pointwise
        self._bias = bias
        self._is_narrow = weight.shape[0] <= _NARROW_COLUMNS

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows in _SLOW_FEW_ROWS:
            return self._multiply(F.pad(x, (0, 0, 0, _FAST_FEW_ROWS - rows)))[:rows]
        threads = torch.get_num_threads()
        if self._is_narrow and threads > 1 and rows // threads in _SLOW_ROWS_PER_THREAD:
            parts = torch.split(x, _FAST_ROWS_PER_THREAD * threads)
            return torch.cat([self._multiply(part) for part in parts])
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        product: Tensor = self._operator(x, self._weight, self._bias, "none", [], "")
        return product


class Int8:
    """Symmetric int8 weights with bfloat16 activations, CPU only."""

    __slots__ = ("_bias", "_scale", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        largest = weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-8)
        scale = largest / 127.0
        self._weight = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8).contiguous()
        self._scale = scale.squeeze(1).to(torch.bfloat16)
        self._bias = bias

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the weight consists of whole tiles, as the kernel requires."""
        return weight.shape[0] % _INT8_COLUMNS == 0 and weight.shape[1] % _INT8_DEPTH == 0

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= _INT8_ROWS:
            return F.linear(x, self._weight * self._scale[:, None], self._bias)
        out = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scale)
        return out if self._bias is None else out + self._bias


def projection(weight: Tensor, bias: Tensor | None, quantize: Quantize = "none") -> Projection:
    """The fastest projection for this weight."""
    if weight.device.type == "cpu" and weight.dtype is torch.bfloat16:
        if quantize == "int8" and Int8.fits(weight):
            return Int8(weight, bias)
        if _can_pack():
            return Packed(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


def _can_pack() -> bool:
    """Whether the operators exist, since they are not public, and support this CPU."""
    operators = torch.ops.mkldnn
    has_operators = all(
        hasattr(operators, name) for name in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight")
    )
    return has_operators and bool(operators._is_mkldnn_bf16_supported())
