"""Writer of traces as Mooncake JSONL, also of recordings, whose requests end in another order than they arrive."""

from __future__ import annotations

import gzip
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from msgspec.structs import replace

from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

_DECIMALS = 3
"""Decimals of times in milliseconds."""


def write_trace(path: str | Path, records: Iterable[TraceRecord]) -> int:
    """Write a trace, compressed if the name ends in `.gz`; return the number of records.

    The file is replaced at the end, so `records` may be read from the same file.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.part")
    encode = msgspec.json.Encoder().encode
    count = 0
    try:
        with ExitStack() as stack:
            file = stack.enter_context(_created(part))
            if target.suffix == ".gz":
                # Without name and time in the gzip header, equal records give equal files.
                file = cast(BinaryIO, stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)))
            for record in records:
                file.write(encode(_rounded(record)) + b"\n")
                count += 1
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return count


def _created(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}", key="trace", remedy="choose a writable file"
        ) from error


def _rounded(record: TraceRecord) -> TraceRecord:
    time = round(float(record.timestamp), _DECIMALS)
    return replace(record, timestamp=int(time) if time.is_integer() else time)


_decode = msgspec.json.Decoder(TraceRecord).decode
_encode = msgspec.json.Encoder().encode


class UnsortedTrace:
    """Writes lines to `PATH.unsorted`; `finish` sorts them into PATH, `discard` deletes them.

    Memory use is 16 bytes per request; a killed recorder loses nothing.

    `kvolt trace convert --sort` recovers the file of a killed recorder.
    """

    def __init__(self, path: str | Path, replace_left: bool = False) -> None:
        """`replace_left` overwrites the temporary file of an earlier recording."""
        self._path = Path(path)
        self.unsorted_path = self._path.with_name(f"{self._path.name}.unsorted")
        self._times = array("d")
        self._starts = array("q")
        self._size_bytes = 0
        try:
            self._file: BinaryIO = self.unsorted_path.open("w+b" if replace_left else "x+b")
        except FileExistsError as error:
            raise ConfigError(
                f"{self.unsorted_path} exists: another recording is running or was killed",
                key="trace",
                remedy="recover it with `kvolt trace convert --sort`, or replace it with --force",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}", key="trace", remedy="choose a writable file"
            ) from error

    @property
    def num_records(self) -> int:
        return len(self._times)

    def add(self, record: TraceRecord) -> None:
        line = _encode(record) + b"\n"
        self._file.write(line)
        self._times.append(record.timestamp)
        self._starts.append(self._size_bytes)
        self._size_bytes += len(line)

    def flush(self) -> None:
        """Flush the records to the operating system."""
        self._file.flush()

    def finish(self) -> int:
        """Write the sorted trace; return the number of requests. The sort is stable."""
        self._file.flush()
        written = write_trace(self._path, self._in_order())
        self.discard()
        return written

    def discard(self) -> None:
        self._file.close()
        self.unsorted_path.unlink(missing_ok=True)

    def _in_order(self) -> Iterator[TraceRecord]:
        for place in sorted(range(len(self._times)), key=self._times.__getitem__):
            self._file.seek(self._starts[place])
            yield _decode(self._file.readline())
