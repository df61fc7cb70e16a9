"""One large file from the hub into its cache, in pieces that outlive a cut connection and a killed process.

The library takes a lost download up again only within one call. Here the bytes stay in `<sha256>.incomplete`
beside the cache's blobs; whoever comes next asks for the rest, and the whole is taken only if its checksum is right.
Knows no repositories and no progress bars. Raises the library's errors as they are.
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

# HTTPError is the transport's base error, under the one name that all versions of the library have.

_ATTEMPTS = 5
"""In a row without a single new byte."""
_LONGEST_PAUSE_S = 8.0
_LOCK_LOOK_S = 0.25
_RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)


class LargeFile(NamedTuple):
    """What the hub says of a file, and where the cache wants it."""

    url: str
    size_bytes: int
    sha256: str
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    def num_bytes_here(self) -> int:
        """What is here of it now."""
        if self.blob.exists():
            return self.size_bytes
        here = self.partial.stat().st_size if self.partial.exists() else 0
        return min(here, self.size_bytes)


Report = Callable[[int], None]
"""Bytes that are here and were not before; fewer than none when some had to be thrown away."""


def fetch_large(
    file: LargeFile, known_bytes: int, headers: dict[str, str], report: Report, stop: Event
) -> None:
    """Put the file into the cache. Of several processes one fetches, the others wait for it.

    `known_bytes` are here and need no report. When `stop` is set it ends with Cancelled at the next bytes; what
    is here stays for the next time.
    """
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with _open_alone(file.partial, stop) as out:
        if file.blob.exists():  # another process was faster; what we opened may be a new and empty file
            file.partial.unlink(missing_ok=True)
            report(file.size_bytes - known_bytes)
            return
        if out.seek(0, os.SEEK_END) > file.size_bytes:
            _cut(out, 0)
        report(out.tell() - known_bytes)
        _Download(file, headers, out, report, stop).run()
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256").hexdigest()
        if digest != file.sha256:
            _cut(out, 0)
            raise NetworkFault(
                f"{file.url} came with the wrong bytes (sha256 {digest})", remedy="try again: it was dropped"
            )
        os.replace(file.partial, file.blob)


@dataclass(slots=True)
class _Download:
    """Appends to `out`, whose position is the number of bytes that are here."""

    file: LargeFile
    headers: dict[str, str]
    out: BufferedRandom
    report: Report
    stop: Event

    def run(self) -> None:
        """Until the file has its size, over as many connections as that takes."""
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
                raise Cancelled("the download was given up")

    def _receive(self) -> Exception | None:
        """Takes what one answer brings; the error that ended it, if trying again may help."""
        done = self.out.tell()
        headers = {**self.headers, "Accept-Encoding": "identity"}
        if done:
            headers["Range"] = f"bytes={done}-"
        try:
            with get_session().stream(
                "GET", self.file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                hf_raise_for_status(response)
                if done and response.status_code != 206:  # the server knows no ranges: all of it comes again
                    self.report(-done)
                    _cut(self.out, 0)
                for piece in response.iter_raw():
                    self._take(piece)
        except HfHubHTTPError as error:
            if error.response.status_code not in _RETRIED_STATUSES:
                raise
            return error
        except HTTPError as error:
            return error
        return None

    def _take(self, piece: bytes) -> None:
        if self.stop.is_set():
            raise Cancelled("the download was given up")
        room = self.file.size_bytes - self.out.tell()
        self.report(self.out.write(piece[:room]))


def _cut(out: BufferedRandom, num_bytes: int) -> None:
    out.seek(num_bytes)
    out.truncate()


@contextmanager
def _open_alone(path: Path, stop: Event) -> Iterator[BufferedRandom]:
    """The file, made if it is not there, and no other process in it. The kernel frees it with its process."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with open(fd, "r+b") as file:
            while not _lock(file):
                if stop.wait(_LOCK_LOOK_S):
                    raise Cancelled("the download was given up")
            if _is_same_file(fd, path):
                yield file
                return
            # Renamed or removed while we waited: it is no longer what its name says.


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
