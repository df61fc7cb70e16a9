"""The C kernels of the CPU path: built once for this machine, then called with raw pointers.

Owns the way from cpu_kernels.c to functions: the compiler, the file in the cache directory, the threads, and the
structures that both sides know. Where there is no compiler there are no kernels, and the plain forms run. Knows
no batches and no models.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from kvolt.runtime.host.cache_directory import cache_directory

log = logging.getLogger(__name__)

SOURCES = ("cpu_kernels.c", "cpu_attention.h")
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"),
)
_FOR_THIS_CPU = (("-march=native",), ("-mcpu=native",), ())
"""As compilers spell it on one architecture or another."""
_BUILD_TIMEOUT_S = 120.0
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")

NARROW = {torch.float32: 0, torch.bfloat16: 1}
"""The types that the kernels have, and their names there."""
_THREADED_VALUES = 1 << 16
"""From so many values on, a row operation is worth waking the threads: some tens of microseconds of work."""


class KernelsMissing(Exception):
    """Why there are none."""


class Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_blocks", "block_size", "block_stride", "head_stride")),
        *((name, c_int64) for name in ("token_stride", "head_dim", "num_heads", "num_kv_heads")),
        *((name, c_int64) for name in ("num_positions", "narrow")),
        ("scale", c_float),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "num_decodes")),
        *((name, c_void_p) for name in ("positions", "slots", "tables", "context_lens")),
        ("table_width", c_int64),
        ("partials", c_void_p),
        *((name, c_int64) for name in ("max_parts", "rotate_threads", "attend_threads")),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cosines", "sines", "query_norm", "key_norm")),
        ("eps", c_float),
    )


class CpuKernels:
    """The functions of a built library. What takes addresses trusts them."""

    def __init__(self, library: ctypes.CDLL, run_threads: int | None) -> None:
        """`run_threads`: the address of GOMP_parallel, or None for one thread."""
        integer, pointer = c_int64, c_void_p
        self.has_threads = run_threads is not None
        use_threads = library.kvolt_use_threads
        use_threads.argtypes, use_threads.restype = (pointer,), None
        use_threads(run_threads)
        self.part = c_int64.in_dll(library, "kvolt_part").value
        """Tokens of context that are attended in one go; longer contexts can be split over threads."""
        self.pair = c_int64.in_dll(library, "kvolt_pair").value
        self.max_head_dim = c_int64.in_dll(library, "kvolt_max_head_dim").value
        self.attend = library.kvolt_attend
        """(shape, step, layer, q, k, v, row stride in bytes, out): all addresses."""
        self.attend.argtypes, self.attend.restype = (*[pointer] * 6, integer, pointer), None
        self.check = library.kvolt_check
        """(shape, step) -> 0 if every index is inside of the slab."""
        self.check.argtypes, self.check.restype = (pointer, pointer), integer
        self.gather = library.kvolt_gather
        """(shape, view, table, length, out): a context as [kv_heads, length, head_dim]."""
        self.gather.argtypes, self.gather.restype = (*[pointer] * 3, integer, pointer), None
        self._add_rmsnorm = library.kvolt_add_rmsnorm
        self._add_rmsnorm.argtypes = (*[pointer] * 4, integer, integer, c_float, integer, integer)
        self._add_rmsnorm.restype = None
        self._silu_mul = library.kvolt_silu_mul
        self._silu_mul.argtypes, self._silu_mul.restype = (pointer, pointer, *[integer] * 4), None

    def fits_heads(self, head_dim: int) -> bool:
        return head_dim % self.pair == 0 and 0 < head_dim <= self.max_head_dim

    def add_rmsnorm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """As operations.plain_add_rmsnorm; None if that has to do it."""
        narrow = NARROW.get(x.dtype)
        width = weight.numel()
        if (
            narrow is None
            or not is_dense(x, x.dtype)
            or not is_dense(weight, x.dtype)
            or x.shape[-1] != width
        ):
            return None
        if residual is not None and not (is_dense(residual, x.dtype) and residual.shape == x.shape):
            return None
        out = torch.empty_like(x)
        num_values = x.numel()
        self._add_rmsnorm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_values // width,
            width,
            eps,
            narrow,
            self.threads_for(num_values),
        )
        return out, x if residual is None else residual

    def silu_mul(self, gate_up: Tensor) -> Tensor | None:
        """As operations.plain_silu_mul; None if that has to do it."""
        narrow = NARROW.get(gate_up.dtype)
        if narrow is None or gate_up.dim() != 2 or not is_dense(gate_up, gate_up.dtype):
            return None
        rows, both = gate_up.shape
        width = both // 2
        if both % 2:
            return None
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        threads = self.threads_for(rows * both)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, narrow, threads)
        return out

    def threads_for(self, num_values: int) -> int:
        return torch.get_num_threads() if self.has_threads and num_values >= _THREADED_VALUES else 1


def is_dense(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()


@functools.cache
def shared() -> CpuKernels | None:
    """Those of this process; built and loaded the first time. None, said once, where they cannot be had."""
    try:
        return load(cache_directory() / "kernels")
    except KernelsMissing as reason:
        log.info("CPU steps run in plain torch, which is slower: %s", reason)
        return None


def load(folder: Path, compilers: Sequence[str] = COMPILERS) -> CpuKernels:
    """Raises KernelsMissing. A library that is in the folder already was made from the same source, for this CPU."""
    if sys.platform != "linux" or sys.byteorder != "little":
        raise KernelsMissing(f"they are for little-endian Linux, this is {sys.platform}")
    found = [path for path in map(shutil.which, compilers) if path is not None]
    if not found:
        raise KernelsMissing(f"there is no C compiler ({', '.join(compilers)}) to build the kernels with")
    path = folder / f"cpu-{_digest(found[0])}.so"
    try:
        library = ctypes.CDLL(str(path)) if path.exists() else _build(path, found)
        return CpuKernels(library, _thread_starter())
    except (OSError, AttributeError, ValueError) as error:
        path.unlink(missing_ok=True)  # the next start builds it again
        raise KernelsMissing(f"the built kernels cannot be loaded: {error}") from error


def _build(path: Path, compilers: Iterable[str]) -> ctypes.CDLL:
    """Compiled in a folder of its own and moved, so that a file in the cache is always whole."""
    log.info("building kernels for this CPU")
    error = ""
    with tempfile.TemporaryDirectory(prefix="kvolt-kernels-") as scratch:
        made = Path(scratch) / path.name
        for compiler in compilers:
            for cpu in _FOR_THIS_CPU:
                error = _compile(compiler, cpu, made)
                if not error:
                    return _keep(made, path)
    raise KernelsMissing(f"the C compiler failed: {error}")


def _compile(compiler: str, cpu: Sequence[str], made: Path) -> str:
    """What went wrong, in one line; nothing if it did not."""
    source = Path(__file__).with_name(SOURCES[0])
    command = [compiler, *_FLAGS, *cpu, str(source), "-o", str(made), "-lm"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0 and made.exists():
        return ""
    lines = result.stderr.strip().splitlines()
    wrong = [line for line in lines if "error" in line] or lines or [f"exit status {result.returncode}"]
    return wrong[0]


def _keep(made: Path, path: Path) -> ctypes.CDLL:
    """Into the cache, if it can be written; the library works without its file, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copyfile(made, beside)
        beside.replace(path)
    except OSError as error:
        log.info("the built kernels are not kept: %s", error)
        return ctypes.CDLL(str(made))
    return ctypes.CDLL(str(path))


def _digest(compiler: str) -> str:
    """Of all that the library depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsMissing(f"{compiler} does not run: {error}") from error
    whole = hashlib.sha256(repr((_FLAGS, platform.machine(), _cpu(), version)).encode())
    for name in SOURCES:
        whole.update(Path(__file__).with_name(name).read_bytes())
    return whole.hexdigest()[:24]


def _cpu() -> list[str]:
    """What -march=native looks at, of the first processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return []
    return [line for line in first.splitlines() if line.split(":")[0].strip() in _CPU_FIELDS]


def _thread_starter() -> int | None:
    """GOMP_parallel of the OpenMP runtime that torch runs on: GNU's, or another that has its entry points.

    A runtime of our own would keep a second set of threads, and the two would spin for the same cores."""
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {fields[5] for line in mapped if len(fields := line.split(None, 5)) == 6}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    package = str(Path(torch.__file__).parent)  # "torch", and "torch.libs" beside it
    ours = {path for path in runtimes if path.startswith(package)} or runtimes
    if len(ours) != 1:
        return None
    try:
        return ctypes.cast(ctypes.CDLL(ours.pop()).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None
