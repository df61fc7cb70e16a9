"""Rows of a long study on disk, so that one that was stopped goes on where it was.

A row counts only for the very sources that made it: what the router or the twin is changed to is measured anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

_SOURCES = Path(__file__).resolve().parents[2] / "src" / "kvolt"

Row = TypeVar("Row", bound=msgspec.Struct)


def default_folder() -> Path:
    return Path(os.environ.get("KVOLT_BENCH", "~/.cache/kvolt-bench")).expanduser()


def sources_digest() -> str:
    sha = hashlib.sha256()
    for path in sorted((*_SOURCES.rglob("*.py"), *_SOURCES.rglob("*.c"))):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class KeptRows(Generic[Row]):
    """Appended to one by one, by a key that says all that decides a row. A torn line is as if it were not there."""

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self._path = path
        self._digest = sources_digest()
        decode = msgspec.json.Decoder(tuple[str, str, kind]).decode  # type: ignore[valid-type]
        self._rows: dict[str, Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                digest, key, row = decode(line)
            except msgspec.DecodeError:
                continue  # torn, or of an older shape
            if digest == self._digest:
                self._rows[key] = row
        self._file = path.open("wb")  # what others made is of no more use
        for key, row in self._rows.items():
            self._write(key, row)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def add(self, key: str, row: Row) -> None:
        self._rows[key] = row
        self._write(key, row)

    def _write(self, key: str, row: Row) -> None:
        self._file.write(msgspec.json.encode((self._digest, key, row)) + b"\n")
        self._file.flush()

    def close(self, is_over: bool) -> None:
        """`is_over`: the study is kept elsewhere, and these are of no more use."""
        self._file.close()
        if is_over:
            self._path.unlink(missing_ok=True)
