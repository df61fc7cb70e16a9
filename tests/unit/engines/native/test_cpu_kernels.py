"""The C kernels of the CPU path beside plain torch, how they are built, and whose threads they use.

For attention see test_attention_cpu.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.unit.engines.native.cpu_lab import TYPES, close, needed, normal, rounded_alike, threads  # noqa: E402
from torch import Tensor  # noqa: E402

from kvolt.engines.native.kernels import cpu_kernels, operations  # noqa: E402
from kvolt.engines.native.kernels.cpu_kernels import CpuKernels, KernelsMissing  # noqa: E402


@pytest.fixture(scope="module")
def native() -> CpuKernels:
    return needed()


# --- Rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 16), (40, 33), (130, 100), (0, 64)])
@pytest.mark.parametrize("dtype", TYPES)
def test_norm(
    native: CpuKernels, dtype: torch.dtype, rows: int, width: int, has_residual: bool, num_threads: int
) -> None:
    x, weight = normal(rows, width, dtype=dtype, seed=1) * 3, normal(width, dtype=dtype, seed=2)
    residual = normal(rows, width, dtype=dtype, seed=3) if has_residual else None
    expected, summed = operations.plain_add_rmsnorm(
        x.clone(), None if residual is None else residual.clone(), weight, 1e-5
    )
    with threads(num_threads):
        result = native.add_rmsnorm(x, residual, weight, 1e-5)
    assert result is not None
    found, stream = result
    assert stream is (x if residual is None else residual)
    assert torch.equal(stream, summed)
    close(found, expected, dtype)
    rounded_alike(found, expected)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (3, 16), (40, 33), (0, 64)])
@pytest.mark.parametrize("dtype", TYPES)
def test_gate(native: CpuKernels, dtype: torch.dtype, rows: int, width: int, num_threads: int) -> None:
    gate_up = normal(rows, 2 * width, dtype=dtype, seed=1) * 5
    with threads(num_threads):
        found = native.silu_mul(gate_up)
    assert found is not None
    expected = operations.plain_silu_mul(gate_up)
    close(found, expected, dtype)
    rounded_alike(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_gate_of_numbers_at_the_ends(native: CpuKernels, dtype: torch.dtype) -> None:
    ends = [0.0, -0.0, 1e-30, -1e-30, 59.0, -59.0, 61.0, -61.0, 1e4, -1e4, 3e38, float("inf"), float("nan")]
    gate = torch.tensor(ends)
    gate_up = torch.stack([gate, torch.full_like(gate, -0.5)]).flatten()[None].to(dtype)
    found = native.silu_mul(gate_up)
    assert found is not None
    close(found, operations.plain_silu_mul(gate_up), dtype)


def test_rounding_is_to_the_nearest_even(native: CpuKernels) -> None:
    """A sum of two bfloat16s that is half way between two others, both ways, and one that overflows."""
    x = torch.tensor([[1.0, 1.0, 1.0, 3.38e38]]).bfloat16()
    residual = torch.tensor([[2.0**-8, 3 * 2.0**-8, -(2.0**-9), 3.38e38]]).bfloat16()
    expected = residual.clone().add_(x)
    result = native.add_rmsnorm(x, residual, torch.ones(4).bfloat16(), 1e-5)
    assert result is not None
    assert torch.equal(result[1], expected)


@pytest.mark.parametrize(
    "case",
    [
        lambda: (normal(4, 32).half(), None, torch.ones(32).half()),
        lambda: (normal(4, 64)[:, ::2], None, torch.ones(32)),
        lambda: (normal(4, 32), normal(32, 4).T, torch.ones(32)),
        lambda: (normal(4, 32), normal(4, 32), torch.ones(64)[::2]),
        lambda: (normal(4, 32), normal(4, 32), torch.ones(32).bfloat16()),
    ],
    ids=["half", "strided", "strided residual", "strided weight", "mixed types"],
)
def test_what_the_kernels_do_not_take_is_done_plainly(
    native: CpuKernels, case: Callable[[], tuple[Tensor, Tensor | None, Tensor]]
) -> None:
    x, residual, weight = case()
    assert native.add_rmsnorm(x, residual, weight, 1e-5) is None
    other = None if residual is None else residual.clone()
    found, _ = operations.add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(found, operations.plain_add_rmsnorm(x, other, weight, 1e-5)[0])
    assert native.silu_mul(x[:, :31].clone()) is None
    if x.dtype is torch.float16 or not x.is_contiguous():
        assert native.silu_mul(x) is None
    assert torch.equal(operations.silu_mul(x), operations.plain_silu_mul(x)) or native.silu_mul(x) is not None


# --- Building -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(native: CpuKernels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "kernels"
    cpu_kernels.load(folder)
    return folder


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fakecc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library,) = built.iterdir()
    assert library.suffix == ".so"

    def fail(*arguments: object) -> str:
        raise AssertionError("built again")

    monkeypatch.setattr(cpu_kernels, "_compile", fail)
    cpu_kernels.load(built)
    with pytest.raises(AssertionError, match="built again"):
        cpu_kernels.load(built / "other")


def test_another_compiler_or_cpu_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_kernels._digest(fake_compiler(tmp_path, "echo cc 1.0"))
    assert cpu_kernels._digest(fake_compiler(tmp_path, "echo cc 1.0")) == first
    assert cpu_kernels._digest(fake_compiler(tmp_path, "echo cc 1.1")) != first
    monkeypatch.setattr(cpu_kernels, "_cpu", lambda: ["flags: none"])
    assert cpu_kernels._digest(fake_compiler(tmp_path, "echo cc 1.0")) != first


def test_without_a_compiler_there_are_no_kernels(tmp_path: Path) -> None:
    with pytest.raises(KernelsMissing, match="no C compiler"):
        cpu_kernels.load(tmp_path, ("no-such-compiler",))


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo noise >&2; echo 'x.c:1: error: no such thing' >&2; exit 1")
    with pytest.raises(KernelsMissing, match="error: no such thing"):
        cpu_kernels.load(tmp_path / "kernels", (compiler,))
    assert not (tmp_path / "kernels").exists()


def test_a_file_that_is_no_library_is_removed(native: CpuKernels, tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "echo cc")
    library = tmp_path / f"cpu-{cpu_kernels._digest(compiler)}.so"
    library.write_bytes(b"torn")
    with pytest.raises(KernelsMissing, match="cannot be loaded"):
        cpu_kernels.load(tmp_path, (compiler,))
    assert not library.exists()


def test_a_cache_that_cannot_be_written(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_by_copy(compiler: str, cpu: Sequence[str], made: Path) -> str:
        shutil.copyfile(next(built.iterdir()), made)
        return ""

    monkeypatch.setattr(cpu_kernels, "_compile", compile_by_copy)
    (tmp_path / "file").touch()
    loaded = cpu_kernels.load(tmp_path / "file" / "kernels")
    assert loaded.silu_mul(normal(2, 8)) is not None


def test_that_there_are_none_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> CpuKernels:
        raise KernelsMissing("there is no C compiler")

    monkeypatch.setattr(cpu_kernels, "load", fail)
    shared = cpu_kernels.shared.__wrapped__
    monkeypatch.setattr(cpu_kernels, "shared", cpu_kernels.functools.cache(shared))
    with caplog.at_level(logging.INFO):
        assert cpu_kernels.shared() is None
        x = normal(3, 32)
        assert torch.equal(operations.silu_mul(x), operations.plain_silu_mul(x))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "there is no C compiler" in caplog.text


# --- Threads --------------------------------------------------------------------------------------------


def test_torch_and_the_kernels_share_one_openmp_runtime(native: CpuKernels) -> None:
    mapped = Path("/proc/self/maps").read_text().split()
    assert native.has_threads
    assert len({path for path in mapped if "libgomp" in path}) == 1


def test_work_that_is_large_enough_runs_on_the_threads_of_torch(built: Path, tmp_path: Path) -> None:
    """A copy of the library, given threads that only count."""
    (library,) = built.iterdir()
    shutil.copyfile(library, tmp_path / "copy.so")
    asked: list[int] = []
    work_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def run(work: int, data: int, count: int, flags: int) -> None:
        asked.append(count)
        work_type(work)(data)

    copy = CpuKernels(ctypes.CDLL(str(tmp_path / "copy.so")), ctypes.cast(run, ctypes.c_void_p).value)
    small, large = normal(2, 64), normal(300, 2048)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(copy.silu_mul(small), cpu_kernels.shared().silu_mul(small))
        assert asked == []
        found = copy.silu_mul(large)
        assert asked == [2]
        torch.set_num_threads(1)
        assert torch.equal(copy.silu_mul(large), found)
        assert asked == [2]
    finally:
        torch.set_num_threads(before)
    close(found, operations.plain_silu_mul(large), torch.float32)
