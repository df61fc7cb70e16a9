"""Every benchmark runs in its `--smoke` form: its code paths work, and it writes no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
ENTRY = '__name__ == "__main__"'
TIMEOUT_S = 240


def modules_with(text: str) -> list[str]:
    paths = (path for path in FOLDER.rglob("*.py") if ENTRY in path.read_text() and text in path.read_text())
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)


BENCHMARKS = modules_with("    run(main)\n")


def files() -> dict[Path, tuple[int, int]]:
    """Results and traces beside the benchmarks, with time and size."""
    found = (
        path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    )
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of peers (none is installed) and of the model that the frontend's benchmarks share."""
    return tmp_path_factory.mktemp("peer")


def test_the_package_is_walked() -> None:
    assert len(BENCHMARKS) >= 26
    assert modules_with("ArgumentParser(") == [], "a benchmark takes its parser from harness.parser_for"
    assert set(modules_with("parser_for(")) | set(modules_with("study_parser(")) == set(BENCHMARKS)


@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("module", BENCHMARKS)
def test_smoke(module: str, tmp_path: Path, caches: Path) -> None:
    before = files()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVOLT_", "TRITON_"))}
    environ = {
        **kept,
        "PYTHONPATH": os.path.relpath(ROOT, tmp_path),  # relative, as in the docstrings' commands
        "KVOLT_PEER": str(caches),
        "KVOLT_BENCH": str(tmp_path / "rows"),
    }
    done = subprocess.run(
        [sys.executable, "-m", module, "--smoke"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert list(tmp_path.iterdir()) == []
    assert files() == before
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
