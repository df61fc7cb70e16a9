"""A trace file that grows while requests end, which is not the order in which they came.

What comes is on disk at once, beside the file that it will be, so that a recorder that is killed loses nothing; memory
takes sixteen bytes per request. `finish` writes the trace in order of time.
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
    """Lines at `PATH.unsorted` until `finish` makes PATH of them; `discard` makes nothing.

    `kvolt trace convert --sort` reads what a killed recorder leaves.
    """

    def __init__(self, path: str | Path, replace_left: bool = False) -> None:
        """`replace_left`: what an earlier recording to this path has left may go."""
        self._path = Path(path)
        self.unsorted_path = self._path.with_name(f"{self._path.name}.unsorted")
        self._times = array("d")
        self._starts = array("q")
        self._size_bytes = 0
        try:
            self._file: BinaryIO = self.unsorted_path.open("w+b" if replace_left else "x+b")
        except FileExistsError as error:
            raise ConfigError(
                f"{self.unsorted_path} is what a recording has left that was killed, or that runs",
                key="trace",
                remedy="`kvolt trace convert --sort` makes a trace of it; --force replaces it",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}", key="trace", remedy="name a file that can be written"
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
        """From here on only the machine's end could lose what came."""
        self._file.flush()

    def finish(self) -> int:
        """Write the trace; how many requests it has. At equal times they stay in the order they came."""
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
