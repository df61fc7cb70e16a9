"""Directory of a supervisor: logs of its children, its status file, and the config files for its children.

A lock keeps other supervisors out; they use numbered subdirectories. The kernel releases the lock when its process
ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.private_directory import make_private

_LOCK_FILE = ".lock"
_MAX_FOLDERS = 100


@contextmanager
def own_folder(base: Path) -> Iterator[Path]:
    """Lock and return `base`, or `base/2`, `base/3` and so on while other supervisors hold these."""
    folder, lock = _claim(base)
    try:
        yield folder
    finally:
        os.close(lock)


@contextmanager
def private_file(path: Path, text: str) -> Iterator[Path]:
    """A file that only this user can read, deleted on exit."""
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """An empty directory that only this user can read, removed on exit; that of a killed process is replaced."""
    try:
        if path.exists():
            shutil.rmtree(path)
        make_private(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _claim(base: Path) -> tuple[Path, int]:
    try:
        for number in range(1, _MAX_FOLDERS + 1):
            folder = base if number == 1 else base / str(number)
            make_private(folder)
            lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return folder, lock
            except BlockingIOError:
                os.close(lock)
            except BaseException:
                os.close(lock)
                raise
    except OSError as error:
        raise _unwritable(base, error) from error
    raise ConfigError(
        f"{_MAX_FOLDERS} supervisors already write logs to {base}",
        key="supervisor.log_dir",
        remedy="choose another directory with --set supervisor.log_dir=DIR",
    )


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}",
        key="supervisor.log_dir",
        remedy="choose a writable directory with --set supervisor.log_dir=DIR",
    )
