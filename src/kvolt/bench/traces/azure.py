"""Azure's public LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

They contain no prefix information, so records have no hash ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from kvolt.bench.traces.json_lines import MAX_LENGTH
from kvolt.bench.traces.lines import trace_error
from kvolt.core.trace import TraceRecord

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_MILLISECOND = timedelta(milliseconds=1)


def is_header(line: bytes) -> bool:
    names = [name.lower() for name in _cells(line)]
    return all(column.lower() in names for column in COLUMNS)


def read_azure(
    lines: Iterable[tuple[int, bytes]], file: str, block_size: int
) -> Iterator[tuple[int, TraceRecord]]:
    """Line numbers and records; times are relative to the first record. The first line is the header."""
    rows = iter(lines)
    names = [name.lower() for name in _cells(next(rows)[1])]
    places = [names.index(column.lower()) for column in COLUMNS]
    start: datetime | None = None
    for number, line in rows:
        cells = _cells(line)
        if len(cells) != len(names):
            raise trace_error(file, number, f"{len(cells)} columns, the header has {len(names)}")
        when, prompt, answer = (cells[place] for place in places)
        try:
            moment = datetime.fromisoformat(when)
            start = start or moment
            timestamp = (moment - start) / _MILLISECOND
        except (ValueError, TypeError) as error:  # TypeError: only one of the times has a time zone
            raise trace_error(file, number, f"TIMESTAMP: {error}") from error
        yield (
            number,
            TraceRecord(
                timestamp=timestamp,
                input_length=_length(prompt, 1, "ContextTokens", file, number),
                output_length=_length(answer, 0, "GeneratedTokens", file, number),
                block_size=block_size,
            ),
        )


def _length(text: str, least: int, column: str, file: str, number: int) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise trace_error(file, number, f"{column}: expected int, got {text[:40]!r}") from error
    if not least <= value <= MAX_LENGTH:
        raise trace_error(file, number, f"{column}: {value} is not between {least} and {MAX_LENGTH}")
    return value


def _cells(line: bytes) -> list[str]:
    return [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(",")]
