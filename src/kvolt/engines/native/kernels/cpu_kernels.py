"""C kernels for the CPU: compiled once for this machine, then called with raw pointers.

Owns building cpu_kernels.c, the file in the cache directory, the threads, and the structures shared with C. Without a
C compiler there are no kernels, and the plain forms are used. Knows no batches and no models.
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

from kvolt.runtime.host.environment import cache_directory

log = logging.getLogger(__name__)

SOURCES = ("cpu_kernels.c", "cpu_attention.h")
COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
    *("-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps"),
)
_FOR_THIS_CPU = (("-march=native",), ("-mcpu=native",), ())
"""Flags for the local CPU, which depend on the architecture."""
_BUILD_TIMEOUT_S = 120.0
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")

NARROW = {torch.float32: 0, torch.bfloat16: 1}
"""Supported types and their codes in C."""
_THREADED_VALUES = 1 << 16
"""Number of values from which a row operation uses threads: tens of microseconds of work."""


class KernelsMissing(Exception):
    """The kernels cannot be built or loaded; the message has the reason."""


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
    """The functions of a built library. Addresses are not checked."""

    def __init__(self, library: ctypes.CDLL, run_threads: int | None) -> None:
        """`run_threads`: the address of GOMP_parallel, or None for one thread."""
        integer, pointer = c_int64, c_void_p
        self.has_threads = run_threads is not None
        use_threads = library.kvolt_use_threads
        use_threads.argtypes, use_threads.restype = (pointer,), None
        use_threads(run_threads)
        self.part = c_int64.in_dll(library, "kvolt_part").value
        """Context tokens per unit of work; longer contexts can be split over threads."""
        self.pair = c_int64.in_dll(library, "kvolt_pair").value
        self.max_head_dim = c_int64.in_dll(library, "kvolt_max_head_dim").value
        self.attend = library.kvolt_attend
        """(shape, step, layer, q, k, v, row stride in bytes, out): all addresses."""
        self.attend.argtypes, self.attend.restype = (*[pointer] * 6, integer, pointer), None
        self.check = library.kvolt_check
        """(shape, step) -> 0 if every index is inside the slab."""
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
        """Like operations.plain_add_rmsnorm; None if the inputs are not supported."""
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
        """Like operations.plain_silu_mul; None if the inputs are not supported."""
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
    """The kernels of this process, built and loaded on first use; None, with one log line, if that fails."""
    try:
        return load(cache_directory() / "kernels")
    except KernelsMissing as reason:
        log.info("CPU kernels unavailable, using slower plain torch: %s", reason)
        return None


def load(folder: Path, compilers: Sequence[str] = COMPILERS) -> CpuKernels:
    """Load the library from the folder, building it if necessary. Raises KernelsMissing. The file name
    identifies source, compiler and CPU."""
    if sys.platform != "linux" or sys.byteorder != "little":
        raise KernelsMissing(f"they require little-endian Linux, not {sys.platform}")
    compilers_found = [path for path in map(shutil.which, compilers) if path is not None]
    if not compilers_found:
        raise KernelsMissing(f"no C compiler found ({', '.join(compilers)})")
    path = folder / f"cpu-{_digest(compilers_found[0])}.so"
    try:
        library = ctypes.CDLL(str(path)) if path.exists() else _build(path, compilers_found)
        return CpuKernels(library, _thread_starter())
    except (OSError, AttributeError, ValueError) as error:
        path.unlink(missing_ok=True)  # the next start builds it again
        raise KernelsMissing(f"the built kernels cannot be loaded: {error}") from error


def _build(path: Path, compilers: Iterable[str]) -> ctypes.CDLL:
    """Compile in a temporary folder, then move the file to the cache, so that cached files are complete."""
    log.debug("building CPU kernels")
    error = ""
    with tempfile.TemporaryDirectory(prefix="kvolt-kernels-") as scratch:
        built = Path(scratch) / path.name
        for compiler in compilers:
            for cpu in _FOR_THIS_CPU:
                error = _compile(compiler, cpu, built)
                if not error:
                    return _keep(built, path)
    raise KernelsMissing(f"the C compiler failed: {error}")


def _compile(compiler: str, cpu: Sequence[str], built: Path) -> str:
    """Compile; returns an error message of one line, or an empty string."""
    source = Path(__file__).with_name(SOURCES[0])
    command = [compiler, *_FLAGS, *cpu, str(source), "-o", str(built), "-lm"]
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
    if result.returncode == 0 and built.exists():
        return ""
    lines = result.stderr.strip().splitlines()
    errors = [line for line in lines if "error" in line] or lines or [f"exit status {result.returncode}"]
    return errors[0]


def _keep(built: Path, path: Path) -> ctypes.CDLL:
    """Load the library after copying it to the cache, if that is writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copyfile(built, temporary)
        temporary.replace(path)
    except OSError as error:
        log.info("CPU kernels not cached: %s", error)
        return ctypes.CDLL(str(built))
    return ctypes.CDLL(str(path))


def _digest(compiler: str) -> str:
    """Hash of everything that the library depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsMissing(f"{compiler} does not run: {error}") from error
    digest = hashlib.sha256(repr((_FLAGS, platform.machine(), _cpu(), version)).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:24]


def _cpu() -> list[str]:
    """CPU properties that -march=native depends on, of the first processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return []
    return [line for line in first.splitlines() if line.split(":")[0].strip() in _CPU_FIELDS]


def _thread_starter() -> int | None:
    """Address of GOMP_parallel in torch's OpenMP runtime: GNU's or a compatible one. A second runtime would
    have its own threads, which would compete for the same cores."""
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {fields[5] for line in mapped if len(fields := line.split(None, 5)) == 6}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    package = str(Path(torch.__file__).parent)  # "torch", and "torch.libs" temporary it
    torch_runtimes = {path for path in runtimes if path.startswith(package)} or runtimes
    if len(torch_runtimes) != 1:
        return None
    try:
        return ctypes.cast(ctypes.CDLL(torch_runtimes.pop()).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        return None
