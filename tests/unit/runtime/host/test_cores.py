from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.cores import cpu_quota, parse_cpu_max, share_cores, thread_env, usable_cores


@pytest.mark.parametrize(
    ("available", "num_engines", "reserved", "shares"),
    [
        (range(8), 2, 0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (range(8), 2, 1, [[1, 2, 3, 4], [5, 6, 7]]),
        ([4, 6, 9], 1, 1, [[6, 9]]),
        # Two engines on two cores: one each; the reservation gives way.
        (range(2), 2, 1, [[0], [1]]),
        (range(3), 2, 2, [[1], [2]]),
        # More engines than cores.
        (range(2), 5, 1, [[0], [1], [0], [1], [0]]),
        ([3], 1, 4, [[3]]),
        (range(4), 0, 1, []),
        (range(4), 1, -3, [[0, 1, 2, 3]]),
    ],
)
def test_shares(available: list[int], num_engines: int, reserved: int, shares: list[list[int]]) -> None:
    assert share_cores(list(available), num_engines, reserved) == shares


@pytest.mark.parametrize("num_cores", range(1, 20))
def test_shares_are_fair_and_apart(num_cores: int) -> None:
    for num_engines in range(1, num_cores + 1):
        shares = share_cores(list(range(num_cores)), num_engines, 2)
        flat = [core for share in shares for core in share]
        assert len(flat) == len(set(flat))
        sizes = [len(share) for share in shares]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


def test_no_core_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError):
        share_cores([], 1, 0)


def test_thread_env() -> None:
    assert thread_env([4, 5, 6]) == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert thread_env([])["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("5 0", None), ("nonsense here", None)],
)
def test_cpu_max(text: str, cores: float | None) -> None:
    assert parse_cpu_max(text) == cores


@pytest.fixture
def cgroup(tmp_path: Path) -> tuple[Path, Path]:
    """A cgroup tree whose middle group has the tightest quota, and a process in its leaf."""
    root = tmp_path / "cgroup"
    (root / "pod" / "box").mkdir(parents=True)
    (root / "pod" / "cpu.max").write_text("50000 100000")
    (root / "pod" / "box" / "cpu.max").write_text("max 100000")
    (tmp_path / "cpu.max").write_text("1 100000")  # above the root: never looked at
    membership = tmp_path / "membership"
    membership.write_text("3:cpu:/other\n0::/pod/box\n")
    return root, membership


def test_the_tightest_quota_of_all_parents_counts(cgroup: tuple[Path, Path]) -> None:
    assert cpu_quota(*cgroup) == 0.5


def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "absent") is None
    (tmp_path / "v1").write_text("3:cpu:/x\n")
    assert cpu_quota(tmp_path, tmp_path / "v1") is None


def test_a_quota_cuts_the_number(cgroup: tuple[Path, Path], tmp_path: Path) -> None:
    free = usable_cores(tmp_path, tmp_path / "absent")
    cut = usable_cores(*cgroup)
    assert cut == free[:1]
    assert list(free) == sorted(free)
