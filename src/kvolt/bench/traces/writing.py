"""Writer of traces as Mooncake JSONL."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
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
