"""A trace written as requests end: in order of time at the end, and nothing lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvolt.bench.traces import ReadOptions, read_trace
from kvolt.bench.traces.writing import UnsortedTrace
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


def record(timestamp: float, output_length: int = 1) -> TraceRecord:
    return TraceRecord(
        timestamp=timestamp, input_length=3, output_length=output_length, hash_ids=(7,), block_size=16
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_records_are_in_order_of_time_at_the_end(tmp_path: Path, name: str) -> None:
    trace = UnsortedTrace(tmp_path / name)
    for timestamp, length in ((5.0, 1), (2.0, 2), (9.5, 3), (2.0, 4)):
        trace.add(record(timestamp, length))
    assert trace.num_records == 4
    assert trace.finish() == 4
    assert list(read_trace(tmp_path / name)) == [record(2, 2), record(2, 4), record(5, 1), record(9.5, 3)]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_came_is_on_disk_before_the_end(tmp_path: Path) -> None:
    trace = UnsortedTrace(tmp_path / "t.jsonl")
    trace.add(record(5.0))
    trace.add(record(2.0))
    trace.flush()
    left = list(read_trace(trace.unsorted_path, ReadOptions(in_order=False)))
    assert [each.timestamp for each in left] == [5.0, 2.0]
    with pytest.raises(ConfigError, match="another recording is running or was killed") as caught:
        UnsortedTrace(tmp_path / "t.jsonl")
    assert "--sort" in str(caught.value.fields["remedy"])
    again = UnsortedTrace(tmp_path / "t.jsonl", replace_left=True)
    again.discard()
    trace.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        UnsortedTrace(tmp_path / "nowhere" / "t.jsonl")
