"""The native index is built from the source that lies here, and kvolt installs without it where it cannot be."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvolt.router import index

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "kvolt" / "router" / "_index_native.c"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class App:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook_in(hook: ModuleType, root: Path) -> Any:
    (root / hook.SOURCE).parent.mkdir(parents=True)
    return hook.NativeIndexHook(str(root), {}, None, None, str(root), "wheel", app=App())


@pytest.mark.skipif(not index.IS_NATIVE, reason="there is no native index here")
def test_the_module_was_built_from_this_source() -> None:
    from kvolt.router import _index_native

    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    assert digest == _index_native.SOURCE_DIGEST, "the C file has changed: `pip install -e .` builds it anew"


def test_a_machine_with_a_compiler_has_it(hook: ModuleType) -> None:
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if hook.find_compiler() is None or not has_headers:
        pytest.skip("no compiler here")
    assert index.IS_NATIVE, "`pip install -e .` builds it"


def test_without_a_compiler_a_wheel_is_plain_and_says_so(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "")
    made = hook_in(hook, tmp_path)
    (tmp_path / hook.SOURCE).write_text("int x;")
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    made.initialize("standard", build_data)
    made.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}, "pure_python": True}
    (warning,) = made.app.warnings
    assert "in Python: no C compiler" in warning


def test_a_compiler_that_fails_leaves_no_old_module(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hook_in(hook, tmp_path)
    name = f"_index_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    old = (tmp_path / hook.SOURCE).with_name(name)
    old.write_text("of an older source")
    (tmp_path / hook.SOURCE).write_text("int x;")
    monkeypatch.setenv("CC", "sh -c 'echo no such header >&2; exit 1' --")
    made.initialize("editable", {})
    assert not old.exists()
    assert "no such header" in made.app.warnings[0]
    monkeypatch.setenv("CC", "/no/such/compiler")
    made.initialize("editable", {})
    assert "/no/such/compiler" in made.app.warnings[1]
    assert [path.name for path in old.parent.iterdir()] == ["_index_native.c"]


def test_a_wheel_carries_what_was_compiled(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hook_in(hook, tmp_path)
    (tmp_path / hook.SOURCE).write_text("int x;")
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    made.initialize("standard", build_data)
    ((built, place),) = build_data["force_include"].items()
    assert place.startswith("kvolt/router/_index_native.")
    assert "KVOLT_SOURCE_DIGEST" in Path(built).read_text()
    assert (build_data["pure_python"], build_data["infer_tag"]) == (False, True)
    made.finalize("standard", build_data, "")
    assert not Path(built).exists()


def test_which_compiler(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc -m64")
    assert hook.find_compiler() == ["ccache", "gcc", "-m64"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert hook.find_compiler() is None
