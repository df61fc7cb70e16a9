"""Many copies between a device and pinned memory at once, by its copy engines. Imported only where a device is used.

A kernel that copies takes the device from who computes: of two processes one waits while the other has it, and both
take twice as long. Copy engines work beside them. The driver takes a batch of copies in one call (since CUDA 12.8), by
ctypes since torch has none; where it does not, torch makes one after the other.
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

from kvolt.transfer.memory.piece_checks import Numbers

log = logging.getLogger(__name__)

_NOT_SUPPORTED = 801
_VERSION = 12080
"""Of CUDA, whose form of the call this is: a newer driver has it still."""
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
    """Whether the driver takes many copies at once."""
    return _batch_call() is not None


def copy_pieces(
    dst: Tensor, dst_offsets: Numbers, src: Tensor, src_offsets: Numbers, piece_bytes: int
) -> None:
    """On the current stream, which must be one that was made. Comes back before it is done. Offsets are checked."""
    error = _copy_batch(dst_offsets + dst.data_ptr(), src_offsets + src.data_ptr(), piece_bytes)
    if error:
        log.debug("a batch of copies was refused (CUDA error %d): one after the other", error)
        for to, origin in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
            dst[to : to + piece_bytes].copy_(src[origin : origin + piece_bytes], non_blocking=True)


def _copy_batch(targets: Numbers, sources: Numbers, piece_bytes: int) -> int:
    """An error of CUDA, or 0. Where it is one, any of them may have been copied."""
    batch = _batch_call()
    if batch is None:
        return _NOT_SUPPORTED
    # The driver's own calls need a context in the thread they are made in, which torch's bring. Nothing waits here.
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
    """cuMemcpyBatchAsync, where the driver has it."""
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
        found, status = ctypes.c_void_p(), ctypes.c_int()
        error = driver.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(found),
            _VERSION,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
    except (OSError, AttributeError):
        return None
    if error or not found.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    takes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    return ctypes.CFUNCTYPE(ctypes.c_int, *takes)(found.value)
