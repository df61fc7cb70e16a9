"""`read_trace`: any trace file as records. The format is found by looking into the file, never by its name.

What all formats must keep is checked here: times that do not run backwards, and as many hash ids as there are blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

import msgspec

from kvolt.bench.traces.azure import COLUMNS, is_header, read_azure
from kvolt.bench.traces.json_items import ItemReader
from kvolt.bench.traces.json_lines import read_json_lines
from kvolt.bench.traces.lines import UNREADABLE, numbered_lines, opened, strip_mark, trace_error
from kvolt.bench.traces.sharegpt import (
    BLOCK_SIZE as CHAT_BLOCK_SIZE,
)
from kvolt.bench.traces.sharegpt import (
    TokenCounter,
    count_words,
    read_sharegpt_array,
    read_sharegpt_lines,
)
from kvolt.core.trace import TraceRecord

MOONCAKE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a file does not say itself."""

    block_size: int | None = None
    """Tokens per hash id where records do not tell: 512 in Mooncake's traces. For chats: of the ids that are made."""
    count_tokens: TokenCounter = count_words
    """For files with text."""
    in_order: bool = True
    """Whether a time before its predecessor's is an error. Only who sorts next can do without."""


def read_trace(path: str | Path, options: ReadOptions | None = None) -> Iterator[TraceRecord]:
    """Records one by one, in the file's order; memory does not grow with the file.

    A broken file is a ConfigError with `file`, `line` and `reason`, raised when that line is reached.
    """
    options = options or ReadOptions()
    file = str(path)
    before: tuple[int, float] | None = None
    with opened(Path(path)) as stream:
        for line, record in _records(stream, file, options):
            _check_hash_ids(record, file, line)
            if not 0 <= record.timestamp < float("inf"):
                raise trace_error(file, line, f"timestamp {record.timestamp:g} is negative or endless")
            if options.in_order and before is not None and record.timestamp < before[1]:
                raise trace_error(
                    file,
                    line,
                    f"timestamp {record.timestamp:g} is before {before[1]:g} of line {before[0]}",
                    "`kvolt trace convert --sort` puts records in order",
                )
            before = line, record.timestamp
            yield record
    if before is None:
        raise trace_error(file, 1, "no requests in it", "name a file with at least one request")


def _records(stream: BufferedReader, file: str, options: ReadOptions) -> Iterator[tuple[int, TraceRecord]]:
    try:
        start = strip_mark(stream.peek(1)).lstrip()
    except UNREADABLE as error:
        raise trace_error(file, 1, f"cannot be read: {error}", "fetch the file again") from error
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
        remedy = "Mooncake JSONL, Azure CSV and ShareGPT JSON can be read, see `kvolt trace --help`"
        raise trace_error(file, first[0], known, remedy)
    if _is_chat(first[1]):
        return read_sharegpt_lines(lines, file, options.count_tokens, chat_block_size)
    return read_json_lines(lines, file, block_size)


def _is_chat(line: bytes) -> bool:
    try:
        return "conversations" in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the reader of records says what is wrong with it


def _check_hash_ids(record: TraceRecord, file: str, line: int) -> None:
    num_ids, length, block_size = len(record.hash_ids), record.input_length, record.block_size
    num_blocks = -(-length // block_size)
    if num_ids and num_ids != num_blocks:
        few = "too few" if num_ids < num_blocks else "too many"
        raise trace_error(
            file,
            line,
            f"{num_ids} hash ids are {few}: {length} tokens are {num_blocks} blocks of {block_size}",
            "name the block size of the trace (--trace-block-size), or correct that line",
        )
