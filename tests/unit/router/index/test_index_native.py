"""Native modules match their sources, and kvolt installs without a compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvolt.kv.disk import fp8
from kvolt.router.index import prefix_index as index
from kvolt.router.policy import cost_model
from kvolt.transfer.memory import block_bytes

ROOT = Path(__file__).parents[4]
SOURCES = ROOT / "src"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


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
    for module in hook.MODULES:
        source = root / hook.SOURCES / f"{module}.c"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("int x;")
    return hook.NativeModulesHook(str(root), {}, None, None, str(root), "wheel", app=App())


@pytest.mark.skipif(not index.IS_NATIVE, reason="there is no native index here")
def test_the_modules_were_built_from_these_sources(hook: ModuleType) -> None:
    sources = {path.relative_to(SOURCES).with_suffix("").as_posix() for path in SOURCES.rglob("*_native.c")}
    assert sources == set(hook.MODULES)
    for name in hook.MODULES:
        module = importlib.import_module(name.replace("/", "."))
        digest = hashlib.sha256((SOURCES / f"{name}.c").read_bytes()).hexdigest()
        assert digest == module.SOURCE_DIGEST, f"{name}.c has changed: `pip install -e .` builds it anew"


def test_a_machine_with_a_compiler_has_it(hook: ModuleType) -> None:
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if hook.find_compiler() is None or not has_headers:
        pytest.skip("no compiler here")
    assert index.IS_NATIVE, "`pip install -e .` builds it"
    assert cost_model.native_predict is not None
    assert block_bytes.IS_NATIVE
    assert fp8.IS_NATIVE


def test_without_a_compiler_a_wheel_is_pure_python_with_a_warning(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "")
    made = hook_in(hook, tmp_path)
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    made.initialize("standard", build_data)
    made.finalize("standard", build_data, "")
    assert build_data == {"force_include": {}, "pure_python": True}
    assert len(made.app.warnings) == len(hook.MODULES)
    assert all("replaces it: no C compiler" in warning for warning in made.app.warnings)
    assert "_bytes_native.c" in made.app.warnings[-1]


def test_a_compiler_that_fails_leaves_no_old_module(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hook_in(hook, tmp_path)
    old = tmp_path / hook.SOURCES / f"{hook.MODULES[0]}{SUFFIX}"
    old.write_text("of an older source")
    monkeypatch.setenv("CC", "sh -c 'echo no such header >&2; exit 1' --")
    made.initialize("editable", {})
    assert not old.exists()
    assert "no such header" in made.app.warnings[0]
    monkeypatch.setenv("CC", "/no/such/compiler")
    made.initialize("editable", {})
    assert "/no/such/compiler" in made.app.warnings[-1]
    left = {path.relative_to(tmp_path / hook.SOURCES).as_posix() for path in tmp_path.rglob("*.*")}
    assert left == {f"{module}.c" for module in hook.MODULES}


def test_a_wheel_carries_what_was_compiled(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = hook_in(hook, tmp_path)
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    made.initialize("standard", build_data)
    places = build_data["force_include"]
    assert set(places.values()) == {f"{module}{SUFFIX}" for module in hook.MODULES}
    assert all("KVOLT_SOURCE_DIGEST" in Path(built).read_text() for built in places)
    assert (build_data["pure_python"], build_data["infer_tag"]) == (False, True)
    made.finalize("standard", build_data, "")
    assert not any(Path(built).exists() for built in places)


def test_which_compiler(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "ccache gcc -m64")
    assert hook.find_compiler() == ["ccache", "gcc", "-m64"]
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert hook.find_compiler() is None
