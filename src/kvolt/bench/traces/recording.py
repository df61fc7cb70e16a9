"""Trace file of a recording, written as requests end and sorted by arrival time at the end.

Records are written to a temporary file at once, so that a killed recorder loses nothing; memory use is 16 bytes per
request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvolt.bench.traces.writing import write_trace
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

_decode = msgspec.json.Decoder(TraceRecord).decode
_encode = msgspec.json.Encoder().encode


class UnsortedTrace:
    """Writes lines to `PATH.unsorted`; `finish` sorts them into PATH, `discard` deletes them.

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
