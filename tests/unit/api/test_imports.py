"""`import kvolt` is light, and its names are those of the API."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvolt

HEAVY = {"aiohttp", "numpy", "rich", "torch", "uvloop", "zmq"}


def modules_after(code: str) -> set[str]:
    """Modules of a fresh interpreter after some code."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = modules_after("import kvolt")
    assert "kvolt" in loaded
    assert not loaded & HEAVY
    assert not {name for name in loaded if name.startswith("kvolt.") and name != "kvolt.version"}


def test_the_api_needs_no_torch() -> None:
    loaded = modules_after("from kvolt import LLM, AsyncLLM, Client, SamplingParams")
    assert not loaded & {"aiohttp", "torch"}


def test_the_client_needs_no_engine() -> None:
    assert not {
        name for name in modules_after("from kvolt import Client") if name.startswith("kvolt.engines")
    }


def test_all_names_resolve() -> None:
    assert [getattr(kvolt, name).__name__ for name in kvolt.__all__ if name != "__version__"] == [
        name for name in kvolt.__all__ if name != "__version__"
    ]
    assert dir(kvolt) == sorted(kvolt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LLMS'"):
        _ = kvolt.LLMS  # type: ignore[attr-defined]


def test_type_checkers_see_what_is_loaded_lazily() -> None:
    source = Path(kvolt.__file__).read_text()
    imported = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvolt.")
        for alias in node.names
    }
    assert imported == {**kvolt._MODULES, "__version__": "kvolt.version"}
    assert sorted(imported) == sorted(kvolt.__all__)
