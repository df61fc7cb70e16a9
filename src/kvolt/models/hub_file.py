"""Downloads a large file from the hub into its cache; resumable after a lost connection or a killed process.

huggingface_hub resumes a download only within one call. Here the data stays in `<sha256>.incomplete` beside the
cache's blobs; the next call requests the rest, and the file is accepted only if its checksum is correct. Knows
neither repositories nor progress bars. Errors of the library are raised unchanged.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from threading import Event
from typing import NamedTuple

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

from kvolt.core.errors import Cancelled, NetworkFault

# HTTPError is the base class of transport errors in all versions of the library.

_ATTEMPTS = 5
"""Most consecutive attempts without a new byte."""
_LONGEST_PAUSE_S = 8.0
_LOCK_POLL_S = 0.25
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)


class LargeFile(NamedTuple):
    """A file of the hub and its path in the cache."""

    url: str
    size_bytes: int
    sha256: str
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def num_bytes_present(self) -> int:
        """Bytes downloaded so far."""
        if self.blob.exists():
            return self.size_bytes
        num_present = self.partial.stat().st_size if self.partial.exists() else 0
        return min(num_present, self.size_bytes)


Report = Callable[[int], None]
"""Number of new bytes; negative if downloaded bytes were discarded."""


def fetch_large(
    file: LargeFile, known_bytes: int, headers: dict[str, str], report: Report, stop: Event
) -> None:
    """Download the file into the cache. Only one process downloads it; others wait.

    `known_bytes` have been reported already. After `stop` is set, raises Cancelled at the next data; downloaded data
    stays for the next call.
    """
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _open_locked(file.partial, stop) as out:
        if file.blob.exists():  # another process has completed it; the opened file may be new and empty
            file.partial.unlink(missing_ok=True)
            report(file.size_bytes - known_bytes)
            return
        if out.seek(0, os.SEEK_END) > file.size_bytes:
            _truncate(out, 0)
        report(out.tell() - known_bytes)
        _Download(file, headers, out, report, stop).run()
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256").hexdigest()
        if digest != file.sha256:
            _truncate(out, 0)
            raise NetworkFault(
                f"{file.url} has an unexpected checksum: sha256 {digest}",
                remedy="retry; the data was discarded",
            )
        os.replace(file.partial, file.blob)


@dataclass(slots=True)
class _Download:
    """Appends to `out`, whose position is the number of downloaded bytes."""

    file: LargeFile
    headers: dict[str, str]
    out: BufferedRandom
    report: Report
    stop: Event

    def run(self) -> None:
        """Download until the file is complete, reconnecting as needed."""
        failures = 0
        while self.out.tell() < self.file.size_bytes:
            before = self.out.tell()
            error = self._receive()
            if self.out.tell() >= self.file.size_bytes:
                return
            failures = 1 if self.out.tell() > before else failures + 1
            if failures > _ATTEMPTS:
                raise error or NetworkFault(f"{self.file.url} ends after {self.out.tell()} bytes")
            if self.stop.wait(min(2.0 ** (failures - 2), _LONGEST_PAUSE_S)):
                raise Cancelled("the download was stopped")

    def _receive(self) -> Exception | None:
        """Receive one response. Returns the error that ended it if a retry may help."""
        done = self.out.tell()
        headers = {**self.headers, "Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        try:
            with get_session().stream(
                "GET", self.file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                hf_raise_for_status(response)
                if done and response.status_code != 206:  # no range support: the whole file is sent again
                    self.report(-done)
                    _truncate(self.out, 0)
                for piece in response.iter_raw():
                    self._write(piece)
        except HfHubHTTPError as error:
            if error.response.status_code not in _RETRIED_STATUSES:
                raise
            return error
        except HTTPError as error:
            return error
        return None

    def _write(self, piece: bytes) -> None:
        if self.stop.is_set():
            raise Cancelled("the download was stopped")
        num_left = self.file.size_bytes - self.out.tell()
        self.report(self.out.write(piece[:num_left]))


def _truncate(out: BufferedRandom, num_bytes: int) -> None:
    out.seek(num_bytes)
    out.truncate()


@contextmanager
def _open_locked(path: Path, stop: Event) -> Iterator[BufferedRandom]:
    """Open the file, creating it if necessary, and lock it. The kernel releases the lock when the process exits."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with open(fd, "r+b") as file:
            while not _lock(file):
                if stop.wait(_LOCK_POLL_S):
                    raise Cancelled("the download was stopped")
            if _is_same_file(fd, path):
                yield file
                return
            # It was renamed or removed while waiting: open the current file of that name.


def _lock(file: BufferedRandom) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
