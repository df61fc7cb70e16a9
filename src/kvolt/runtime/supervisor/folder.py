"""The folder of one supervisor: its children's logs, its status file, the config it gives them.

A lock keeps a second supervisor out, which then takes a numbered folder inside; the system frees it when
its holder is gone, however it went.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvolt.core.errors import ConfigError
from kvolt.runtime.host.private_directory import make_private

_LOCK_FILE = ".lock"
_MAX_FOLDERS = 100


@contextmanager
def own_folder(base: Path) -> Iterator[Path]:
    """`base`, or `base/2`, `base/3` and so on while other supervisors hold those; ours until the end."""
    folder, lock = _claim(base)
    try:
        yield folder
    finally:
        os.close(lock)


@contextmanager
def private_file(path: Path, text: str) -> Iterator[Path]:
    """A file that only this user can read, gone at the end."""
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
        f"{_MAX_FOLDERS} supervisors write logs to {base} already",
        key="supervisor.log_dir",
        remedy="name another folder with --supervisor-log-dir",
    )


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}",
        key="supervisor.log_dir",
        remedy="name a folder of your own with --supervisor-log-dir",
    )
