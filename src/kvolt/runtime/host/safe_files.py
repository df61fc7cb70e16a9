"""Files of secrets and state: bounded reads, durable replacement, and a lock between processes. Calls may block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises OSError for others: a FIFO would block its reader for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Contents of a regular file. Raises OSError if it is larger."""
    with open_regular(path) as file:
        return read_bounded(file, max_bytes)


def read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes")
    return content


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other processes that change a file, by a lock file beside it.

    The lock ends with its process at the latest. Its file stays: removing it would race.
    """
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, atomically and durably. For the holder of its lock."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name survives a power failure
    finally:
        os.close(folder)
