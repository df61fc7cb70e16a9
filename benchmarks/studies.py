"""Long studies in the twin: command line, rows on disk, so that a stopped study continues, and single runs.

A row is valid for the sources of kvolt that produced it; after a change of the sources it is measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from benchmarks.harness import ROOT, in_processes, parser_for, say

from kvolt.bench.load.sample import Sample
from kvolt.core.trace import TraceRecord
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import new_tally, run_twin

_SOURCES = ROOT / "src" / "kvolt"

Job = TypeVar("Job", bound=msgspec.Struct)
Row = TypeVar("Row", bound=msgspec.Struct)


def study_parser(file: str, doc: str | None, peer: str = "") -> argparse.ArgumentParser:
    """Parser of a long study in the twin, which continues where it was stopped."""
    parser = parser_for(file, doc, peer=peer)
    folder = Path(os.environ.get("KVOLT_BENCH", "~/.cache/kvolt-bench")).expanduser()
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="concurrent runs")
    parser.add_argument("--folder", type=Path, default=folder, help="rows of an unfinished study")
    return parser


def parse_study(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.smoke:
        options.processes, options.folder = 1, None
        os.environ.pop("KVOLT_TRACES", None)  # a public trace takes seconds to read
    return options


def samples_of(settings: TwinSettings, records: Iterable[TraceRecord]) -> list[Sample]:
    """Samples of one run of the twin."""
    samples: list[Sample] = []
    run_twin(settings, records, new_tally(settings), samples.append)
    return samples


def sources_digest() -> str:
    sha = hashlib.sha256()
    for path in sorted((*_SOURCES.rglob("*.py"), *_SOURCES.rglob("*.c"))):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class KeptRows(Generic[Row]):
    """Rows by a key of everything that determines them, appended to a file; without a folder, in memory only.

    Torn lines and rows of other sources are ignored.
    """

    def __init__(self, folder: Path | None, name: str, kind: type[Row]) -> None:
        self._path = None if folder is None else folder / f"{name}.jsonl"
        self._digest = sources_digest()
        decode = msgspec.json.Decoder(tuple[str, str, kind]).decode  # type: ignore[valid-type]
        self._rows: dict[str, Row] = {}
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        for line in self._path.read_bytes().split(b"\n") if self._path.exists() else ():
            try:
                digest, key, row = decode(line)
            except msgspec.DecodeError:
                continue  # torn, or of an older shape
            if digest == self._digest:
                self._rows[key] = row
        self._path.write_bytes(b"".join(self._line(key, row) for key, row in self._rows.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def add(self, key: str, row: Row) -> None:
        self._rows[key] = row
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(self._line(key, row))

    def solve(self, work: Callable[[Job], Row], jobs: Sequence[Job], num_processes: int) -> list[Row]:
        """A row for each job, in order; those that are kept are not computed again."""
        left = [job for job in jobs if str(job) not in self._rows]
        for number, (job, row) in enumerate(in_processes(work, left, num_processes), 1):
            self.add(str(job), row)
            say(f"{number}/{len(left)}  {job}")
        return [self._rows[str(job)] for job in jobs]

    def remove(self) -> None:
        """Remove the file: the results of the study are written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _line(self, key: str, row: Row) -> bytes:
        return msgspec.json.encode((self._digest, key, row)) + b"\n"
