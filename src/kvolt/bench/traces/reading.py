"""Reader of trace files in all formats. The format is detected from the content, not the name.

Checks the rules of all formats: non-decreasing times, and one hash id per block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

import msgspec

from kvolt.bench.traces.azure import COLUMNS, is_header, read_azure
from kvolt.bench.traces.json_lines import read_json_lines
from kvolt.bench.traces.lines import UNREADABLE, ItemReader, numbered_lines, opened, strip_mark, trace_error
from kvolt.bench.traces.sharegpt import (
    BLOCK_SIZE as CHAT_BLOCK_SIZE,
)
from kvolt.bench.traces.sharegpt import (
    TokenCounter,
    estimate_tokens,
    read_sharegpt_array,
    read_sharegpt_lines,
)
from kvolt.core.trace import TraceRecord

MOONCAKE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for information that a file lacks."""

    block_size: int | None = None
    """Tokens per hash id if records have none: 512 in Mooncake's traces. For chats: block size of generated ids."""
    count_tokens: TokenCounter = estimate_tokens
    """Token counter for files with text."""
    in_order: bool = True
    """Raise an error for decreasing times. Disable it only to sort the records."""


def read_trace(path: str | Path, options: ReadOptions | None = None) -> Iterator[TraceRecord]:
    """Iterate over records in file order, with bounded memory.

    An invalid line raises ConfigError with `file`, `line` and `reason` when it is reached.
    """
    options = options or ReadOptions()
    file = str(path)
    before: tuple[int, float] | None = None
    with opened(Path(path)) as stream:
        for line, record in _records(stream, file, options):
            _check_hash_ids(record, file, line)
            if not 0 <= record.timestamp < float("inf"):
                raise trace_error(file, line, f"timestamp {record.timestamp:g} is negative or infinite")
            if options.in_order and before is not None and record.timestamp < before[1]:
                raise trace_error(
                    file,
                    line,
                    f"timestamp {record.timestamp:g} is before {before[1]:g} of line {before[0]}",
                    "`kvolt trace convert --sort` sorts records",
                )
            before = line, record.timestamp
            yield record
    if before is None:
        raise trace_error(file, 1, "no requests", "choose a file with at least one request")


def _records(stream: BufferedReader, file: str, options: ReadOptions) -> Iterator[tuple[int, TraceRecord]]:
    try:
        start = strip_mark(stream.peek(1)).lstrip()
    except UNREADABLE as error:
        raise trace_error(file, 1, f"cannot be read: {error}", "download the file again") from error
    chat_block_size = options.block_size or CHAT_BLOCK_SIZE
    if start.startswith(b"["):
        items = ItemReader(stream, file)
        return read_sharegpt_array(items, file, options.count_tokens, chat_block_size)
    lines = numbered_lines(stream, file)
    first = next(lines, None)
    if first is None:
        return iter(())
    lines = chain([first], lines)
    block_size = options.block_size or MOONCAKE_BLOCK_SIZE
    if is_header(first[1]):
        return read_azure(lines, file, block_size)
    if not first[1].startswith(b"{"):
        known = f"neither JSON nor a CSV header with {', '.join(COLUMNS)}"
        remedy = "supported formats: Mooncake JSONL, Azure CSV and ShareGPT JSON (`kvolt trace --help`)"
        raise trace_error(file, first[0], known, remedy)
    if _is_chat(first[1]):
        return read_sharegpt_lines(lines, file, options.count_tokens, chat_block_size)
    return read_json_lines(lines, file, block_size)


def _is_chat(line: bytes) -> bool:
    try:
        return "conversations" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the record reader reports the error


def _check_hash_ids(record: TraceRecord, file: str, line: int) -> None:
    num_ids, length, block_size = len(record.hash_ids), record.input_length, record.block_size
    num_blocks = -(-length // block_size)
    if num_ids and num_ids != num_blocks:
        few = "too few" if num_ids < num_blocks else "too many"
        raise trace_error(
            file,
            line,
            f"{num_ids} hash ids are {few}: {length} tokens are {num_blocks} blocks of {block_size}",
            "set --trace-block-size, or correct the line",
        )
