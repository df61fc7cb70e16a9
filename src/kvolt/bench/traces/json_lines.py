"""JSONL traces: Mooncake's public traces, Dynamo's field names, and kvolt's own files.

| field | alias |
| --- | --- |
| timestamp (ms) | created_time |
| input_length, output_length | input_tokens, output_tokens |
| session | session_id |
| delay (ms) | delay_ms |

Other fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvolt.bench.traces.lines import trace_error
from kvolt.core.trace import TraceRecord

MAX_LENGTH = 2**26
"""Maximum length in tokens, so that a wrong number does not exhaust memory."""

_Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
_OutputLength = Annotated[int, Meta(ge=0, le=MAX_LENGTH)]
_HashId = Annotated[int, Meta(ge=0)]
_MAX_HASH_ID = 2**64 - 1
_Delay = Annotated[float, Meta(ge=0)]
_Number = TypeVar("_Number", int, float)
_WHERE = re.compile(r"^(.*?) - at `\$\.?(.*)`$", re.DOTALL)


class _Row(msgspec.Struct):
    timestamp: float | None = None
    created_time: float | None = None
    input_length: _Length | None = None
    input_tokens: _Length | None = None
    output_length: _OutputLength | None = None
    output_tokens: _OutputLength | None = None
    hash_ids: tuple[_HashId, ...] = ()
    block_size: _Length | None = None
    session: str | None = None
    session_id: str | int | None = None
    tenant: str | None = None
    delay: _Delay | None = None
    delay_ms: _Delay | None = None


_decoder = msgspec.json.Decoder(_Row)


def read_json_lines(
    lines: Iterable[tuple[int, bytes]], file: str, block_size: int
) -> Iterator[tuple[int, TraceRecord]]:
    """Line numbers and records. `block_size` applies to lines without one."""
    before = 0.0
    for number, line in lines:
        try:
            row = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise trace_error(file, number, plain_reason(error)) from error
        try:
            record = _record(row, before, block_size)
        except _WrongRow as wrong:
            raise trace_error(file, number, str(wrong)) from wrong
        before = record.timestamp
        yield number, record


class _WrongRow(Exception):
    """A row is not a valid record; the message is the reason."""


def _record(row: _Row, before: float, block_size: int) -> TraceRecord:
    timestamp = _either(row.timestamp, row.created_time)
    delay = _either(row.delay, row.delay_ms)
    if timestamp is None and delay is not None:
        timestamp = before  # a later turn starts when the previous one has ended
    input_length = _either(row.input_length, row.input_tokens)
    output_length = _either(row.output_length, row.output_tokens)
    if timestamp is None:
        raise _WrongRow("no timestamp")
    if input_length is None:
        raise _WrongRow("no input_length")
    if output_length is None:
        raise _WrongRow("no output_length")
    if row.hash_ids and max(row.hash_ids) > _MAX_HASH_ID:
        raise _WrongRow("hash_ids: an id exceeds 64 bits")
    session = row.session_id if row.session is None else row.session
    return TraceRecord(
        timestamp=timestamp,
        input_length=input_length,
        output_length=output_length,
        hash_ids=row.hash_ids,
        block_size=row.block_size or block_size,
        session=None if session is None else str(session),
        tenant=row.tenant,
        delay=delay,
    )


def _either(one: _Number | None, other: _Number | None) -> _Number | None:
    return other if one is None else one


def plain_reason(error: Exception) -> str:
    """msgspec's message with the field first and without quotes."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"bad JSON: {text}"
    match = _WHERE.match(text)
    what, where = (text, "") if match is None else (match[1], f"{match[2]}: ")
    what = what.replace("`", "")
    return f"{where}{what[:1].lower()}{what[1:]}"
