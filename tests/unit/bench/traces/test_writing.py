"""Writing: what was written reads the same, and a file appears only when it is whole."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.bench.traces.trace_lab import record

from kvolt.bench.traces import limit, read_trace, small_trace, write_trace
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_was_written_reads_the_same(tmp_path: Path, name: str) -> None:
    records = small_trace()
    assert write_trace(tmp_path / name, records) == len(records)
    assert list(read_trace(tmp_path / name)) == records
    zipped = (tmp_path / name).read_bytes()[:2] == b"\x1f\x8b"
    assert zipped == name.endswith(".gz")


def test_lines_are_mooncakes(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    plain = TraceRecord(timestamp=27482.0, input_length=3, output_length=1, hash_ids=(46,))
    write_trace(
        path, [plain, TraceRecord(timestamp=27482.00049, input_length=3, output_length=1, session="s")]
    )
    assert path.read_text() == (
        '{"timestamp":27482,"input_length":3,"output_length":1,"hash_ids":[46]}\n'
        '{"timestamp":27482,"input_length":3,"output_length":1,"session":"s"}\n'
    )


def test_equal_records_give_equal_files(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_trace(tmp_path / name, small_trace())
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes())


def test_a_file_may_be_written_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, small_trace())
    assert write_trace(path, limit(read_trace(path), 10)) == 10
    assert len(list(read_trace(path))) == 10


def test_half_a_file_is_never_seen(tmp_path: Path) -> None:
    def failing() -> Iterator[TraceRecord]:
        yield record([1])
        raise ConfigError("broken", key="trace")

    with pytest.raises(ConfigError, match="broken"):
        write_trace(tmp_path / "t.jsonl", failing())
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        write_trace(tmp_path / "nowhere" / "t.jsonl", [])
