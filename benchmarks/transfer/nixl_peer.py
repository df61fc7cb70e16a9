"""NIXL 1.5.1 as the peer: installed into a folder of its own, without torch.

`nixl-cu12` names torch as a dependency, without a version, and looks for it only where it is loaded anyway: without its
dependencies it needs numpy, and no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runtime.pair import BrokenRun

VERSION = "1.5.1"
NAME = f"NIXL {VERSION}"


def installed(folder: Path) -> Path:
    """Its interpreter, installed now if it is not there. BrokenRun says what to do if it cannot be."""
    python = folder / "nixl" / "bin" / "python"
    if not _imports(python):
        print(f"installing {NAME} into {folder / 'nixl'} (once, 0.4 GB)", file=sys.stderr)
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder / "nixl")], "python -m venv needs ensurepip")
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        remedy = (
            f"{NAME} has wheels for Linux on x86-64 and arm64 and comes from PyPI: see that pip reaches an index that "
            "has them, or name the folder of an installed one with --peer-dir or KVOLT_PEER"
        )
        _run([*pip, "numpy"], remedy)
        _run([*pip, "--no-deps", f"nixl-cu12=={VERSION}"], remedy)
        if not _imports(python):
            raise BrokenRun(f"{NAME} is in {folder / 'nixl'} but cannot be imported; remove it and try again")
    return python


def _imports(python: Path) -> bool:
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", "import nixl_cu12._api"], capture_output=True, check=False)
    return done.returncode == 0


def _run(command: Sequence[str], remedy: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise BrokenRun(f"`{' '.join(command)}` failed:\n{said}\n{remedy}")
