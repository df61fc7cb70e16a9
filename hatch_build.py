"""Compiles the native modules while kvolt is installed (ADR 9). Without a C compiler kvolt installs without.

An editable install gets them beside their sources, a wheel carries them and is then one for this Python and platform.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src")
MODULES = (
    "kvolt/router/index/_index_native",
    "kvolt/router/policy/_cost_model_native",
    "kvolt/kv/disk/_fp8_native",
    "kvolt/transfer/memory/_bytes_native",
)
FLAGS = ("-std=c11", "-O3", "-g0", "-fPIC", "-fvisibility=hidden")
SECONDS = 300


class NativeModulesHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        is_editable = version == "editable"
        if not is_editable:
            self._folder = tempfile.mkdtemp(prefix="kvolt-build-")
        for module in MODULES:
            source = Path(self.root) / SOURCES / f"{module}.c"
            name = f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"
            target = (Path(self.root) / SOURCES if is_editable else Path(self._folder)) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if self._build(source, target) and not is_editable:
                build_data["force_include"][str(target)] = name
                build_data["pure_python"] = False
                build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._folder, ignore_errors=True)

    def _build(self, source: Path, target: Path) -> bool:
        problem = compile_module(source, target)
        if problem:
            target.unlink(missing_ok=True)  # one of an older source would be worse than none
            self.app.display_warning(
                f"kvolt: {source.name} is not compiled; slower Python code replaces it: {problem}"
            )
        return not problem


def compile_module(source: Path, target: Path) -> str:
    """Why there is none, or an empty string."""
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler was found"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    half = target.with_name(f".{target.name}.{os.getpid()}")  # a concurrent import sees all or nothing
    command = [
        *compiler,
        *FLAGS,
        *(("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)),
        *(f"-I{folder}" for folder in dict.fromkeys((_path("include"), _path("platinclude")))),
        f'-DKVOLT_SOURCE_DIGEST="{digest}"',
        *(str(source), "-o", str(half)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            return f"{compiler[0]} failed: {done.stderr.strip()[-500:]}"
        os.replace(half, target)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        half.unlink(missing_ok=True)
    return ""


def find_compiler() -> list[str] | None:
    """CC of the environment as it is; else the one that Python was built with, if it is here, or a usual one."""
    named = os.environ.get("CC")
    if named is not None:
        return shlex.split(named) or None
    built_with = shlex.split(sysconfig.get_config_var("CC") or "")[:1]
    found = next(filter(None, map(shutil.which, (*built_with, "cc", "gcc", "clang"))), None)
    return None if found is None else [found]


def _path(name: str) -> str:
    return sysconfig.get_paths()[name]
