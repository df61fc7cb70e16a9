"""Batched copies between a device and pinned memory with its copy engines. Imported only if a device is used.

A copy kernel competes with computation: two processes that share the device both take twice as long. Copy engines run
concurrently. The driver accepts a batch of copies per call since CUDA 12.8, called by ctypes since torch does not
expose it; with older drivers torch issues one copy per piece.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvolt.transfer.memory.pieces import Numbers

log = logging.getLogger(__name__)

_NOT_SUPPORTED = 801
_VERSION = 12080
"""CUDA version of the function signature; newer drivers keep it."""
_IN_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def has_batches() -> bool:
    """Whether the driver supports batched copies."""
    return _batch_call() is not None


def copy_pieces(
    dst: Tensor, dst_offsets: Numbers, src: Tensor, src_offsets: Numbers, piece_bytes: int
) -> None:
    """Enqueue copies on the current stream, which must not be the default stream. Offsets must be valid."""
    error = _copy_batch(dst_offsets + dst.data_ptr(), src_offsets + src.data_ptr(), piece_bytes)
    if error:
        log.debug("batched copy rejected, copying piece by piece: cuda_error=%d", error)
        for to, origin in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
            dst[to : to + piece_bytes].copy_(src[origin : origin + piece_bytes], non_blocking=True)


def _copy_batch(targets: Numbers, sources: Numbers, piece_bytes: int) -> int:
    """Return 0 or a CUDA error code; on an error any subset may have been copied."""
    batch = _batch_call()
    if batch is None:
        return _NOT_SUPPORTED
    # Driver calls need a current context in this thread, which a torch call sets. The stream is idle, so this is fast.
    torch.cuda.current_stream().synchronize()
    count = len(targets)
    sizes = np.full(count, piece_bytes, dtype=np.uint64)
    attributes, applies_from, failed = _Attributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
    return batch(
        targets.ctypes.data,
        sources.ctypes.data,
        sizes.ctypes.data,
        count,
        ctypes.byref(attributes),
        ctypes.byref(applies_from),
        1,
        ctypes.byref(failed),
        torch.cuda.current_stream().cuda_stream,
    )


@cache
def _batch_call() -> Callable[..., int] | None:
    """cuMemcpyBatchAsync; None if the driver lacks it."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        function, status = ctypes.c_void_p(), ctypes.c_int()
        error = driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(function),
            _VERSION,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
    except (OSError, AttributeError):
        return None
    if error or not function.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    argument_types = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return ctypes.CFUNCTYPE(ctypes.c_int, *argument_types)(function.value)
