"""Reading: formats by content, and one error with file, line and reason for everything that is wrong."""

from __future__ import annotations

import gzip
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvolt.bench.traces import ReadOptions, lines, read_trace
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
LATER = '{"timestamp": 7.5, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"


def written(tmp_path: Path, text: str | bytes, name: str = "trace.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_mooncake_lines(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, f"\ufeff{GOOD}\n\n  {LATER}"))
    assert first == TraceRecord(timestamp=0.0, input_length=600, output_length=5, hash_ids=(1, 2))
    assert (second.timestamp, second.hash_ids) == (7.5, (1, 3))


def test_our_own_lines_with_more_fields(tmp_path: Path) -> None:
    line = (
        '{"timestamp": 1, "input_length": 5, "output_length": 0, "hash_ids": [1, 18446744073709551615],'
        ' "block_size": 4, "session": "s", "tenant": "t", "delay": 3, "ttft_ms": 12.5, "later": {"field": []}}'
    )
    (record,) = read_trace(written(tmp_path, line))
    assert record == TraceRecord(
        timestamp=1.0,
        input_length=5,
        output_length=0,
        hash_ids=(1, 2**64 - 1),
        block_size=4,
        session="s",
        tenant="t",
        delay=3.0,
    )


def test_other_names_of_the_same_fields(tmp_path: Path) -> None:
    text = (
        '{"created_time": 5, "input_tokens": 3, "output_tokens": 2, "session_id": 7}\n'
        '{"input_tokens": 9, "output_tokens": 2, "session_id": 7, "delay_ms": 250}\n'
    )
    first, turn = read_trace(written(tmp_path, text), ReadOptions(block_size=64))
    assert (first.timestamp, first.input_length, first.session, first.block_size) == (5.0, 3, "7", 64)
    assert (turn.timestamp, turn.delay) == (5.0, 250.0), (
        "a later turn's time is known when the one before ends"
    )


def test_azure_rows_count_time_from_the_first(tmp_path: Path) -> None:
    text = AZURE + "2023-11-16 18:15:50.9951690,396,109\r\n"
    first, second = read_trace(written(tmp_path, text, "named.jsonl"))
    assert (first.timestamp, first.input_length, first.output_length, first.hash_ids) == (0.0, 374, 44, ())
    assert second.timestamp == pytest.approx(4314.579, abs=0.01)


def test_azure_columns_may_be_elsewhere_and_times_have_zones(tmp_path: Path) -> None:
    text = 'x,"generatedtokens",ContextTokens,TIMESTAMP\n,1,2,2024-05-10 00:00:00.009930+00:00\n'
    (record,) = read_trace(written(tmp_path, text))
    assert (record.input_length, record.output_length) == (2, 1)


@pytest.mark.parametrize(
    "text",
    [
        f"{GOOD}\n{LATER}\n",
        AZURE,
        '[{"conversations": [{"from": "human", "value": "a"},{"from": "gpt", "value": "b"}]}]',
    ],
    ids=["mooncake", "azure", "sharegpt"],
)
def test_gzip_is_found_by_content(tmp_path: Path, text: str) -> None:
    plain = list(read_trace(written(tmp_path, text)))
    assert plain
    assert list(read_trace(written(tmp_path, gzip.compress(text.encode()), "no_suffix"))) == plain


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (
            f"{GOOD}\n{LATER}\n{{broken\n",
            3,
            "bad JSON: JSON is malformed: object keys must be strings (byte 1)",
        ),
        (f"{GOOD}\n\n{LATER[:30]}", 3, "bad JSON: Input data was truncated"),
        (f"{GOOD}\n[1]\n", 2, "expected object, got array"),
        ('{"input_length": 1, "output_length": 1}', 1, "no timestamp"),
        ('{"timestamp": 1, "output_length": 1}', 1, "no input_length"),
        ('{"timestamp": 1, "input_length": 1}', 1, "no output_length"),
        (
            '{"timestamp": "1", "input_length": 1, "output_length": 1}',
            1,
            "timestamp: expected float | null, got str",
        ),
        (
            '{"timestamp": 1, "input_length": 1.5, "output_length": 1}',
            1,
            "input_length: expected int | null, got float",
        ),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', 1, "input_length: expected int >= 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": -1}', 1, "output_length: expected int >= 0"),
        (
            '{"timestamp": 1, "input_length": 99999999999, "output_length": 1}',
            1,
            "input_length: expected int <= 67108864",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
            1,
            "hash_ids[0]: expected int >= 0",
        ),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [18446744073709551616]}',
            1,
            "hash_ids: an id exceeds 64 bits",
        ),
        (
            '{"timestamp": -5, "input_length": 1, "output_length": 1}',
            1,
            "timestamp -5 is negative or infinite",
        ),
        (f"{LATER}\n{GOOD}", 2, "timestamp 0 is before 7.5 of line 1"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            1,
            "1 hash ids are too few: 513 tokens are 2 blocks of 512",
        ),
        (
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            1,
            "2 hash ids are too many: 512 tokens are 1 blocks of 512",
        ),
        ("", 1, "no requests"),
        (" \n\n", 1, "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", 1, "no requests"),
        ("\nhello\n", 2, "neither JSON nor a CSV header with TIMESTAMP, ContextTokens, GeneratedTokens"),
        (AZURE + "2023-11-16 18:15:50,396", 3, "2 columns, the header has 3"),
        (AZURE + "yesterday,1,1", 3, "TIMESTAMP: Invalid isoformat string: 'yesterday'"),
        (AZURE + "2023-11-16 18:15:50,x,1", 3, "ContextTokens: expected int, got 'x'"),
        (AZURE + "2023-11-16 18:15:50,0,1", 3, "ContextTokens: 0 is not between 1 and 67108864"),
        (AZURE + "2023-11-16 18:15:50,1,-1", 3, "GeneratedTokens: -1 is not between 0 and 67108864"),
        (AZURE + "2023-11-16 18:15:40,1,1", 3, "timestamp -6680.59 is negative or infinite"),
        (
            AZURE + "2023-11-16 18:15:50+00:00,1,1",
            3,
            "TIMESTAMP: can't subtract offset-naive and offset-aware datetimes",
        ),
    ],
)
def test_what_is_wrong_has_a_file_a_line_and_a_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    fields = caught.value.fields
    assert (fields["reason"], fields["line"], fields["file"]) == (reason, line, str(path))
    assert caught.value.message == f"{path}:{line}: {reason}"
    assert fields["remedy"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = written(
        tmp_path, GOOD.encode() + b'\n{"timestamp": 8, "session": "\xff\xfe", "input_length": 1}\n'
    )
    with pytest.raises(ConfigError, match=r":2: bad JSON"):
        list(read_trace(path))


def test_records_before_a_broken_line_are_given(tmp_path: Path) -> None:
    rest = read_trace(written(tmp_path, f"{GOOD}\nbroken"))
    assert next(rest).input_length == 600
    with pytest.raises(ConfigError, match=":2: bad JSON"):
        next(rest)


def test_order_is_not_asked_for_where_somebody_sorts(tmp_path: Path) -> None:
    path = written(tmp_path, f"{LATER}\n{GOOD}")
    assert [each.timestamp for each in read_trace(path, ReadOptions(in_order=False))] == [7.5, 0.0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        next(read_trace(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="Is a directory"):
        next(read_trace(tmp_path))
    text = "".join(f'{{"timestamp": {at}, "input_length": 1, "output_length": 1}}\n' for at in range(5000))
    whole = gzip.compress(text.encode())
    path = written(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r":\d+: cannot be read: Compressed file ended"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match=":1: cannot be read"):
        list(read_trace(written(tmp_path, whole[:2] + b"no gzip at all, though it begins so")))


def test_a_line_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    path = written(tmp_path, f"{GOOD}\n{GOOD}{' ' * 50}\n")
    with pytest.raises(ConfigError, match=":2: a line exceeds"):
        list(read_trace(path))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 51200, "output_length": 1, "hash_ids": IDS}\n'.replace(
        "IDS", str(list(range(100)))
    )
    path = written(tmp_path, line * 5000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_trace(path)) == 5000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4


pieces = st.sampled_from(
    [
        *(b"{", b"}", b"[", b"]", b",", b"\n", b"1", b'"', b"\xff", b"\xef\xbb\xbf", b"\x1f\x8b"),
        *(b'"conversations":', b'{"from": "human", "value": "a"}', b'{"from": "gpt", "value": "b"}'),
        *(b"TIMESTAMP,ContextTokens,GeneratedTokens\n", b"2023-11-16 18:15:46,1,1\n"),
        *(GOOD.encode(), LATER.encode(), gzip.compress(GOOD.encode())),
    ]
)


@given(st.one_of(st.binary(max_size=50), st.lists(pieces, max_size=8).map(b"".join)))
@example(gzip.compress(GOOD.encode()) + b"rubbish")
@example(b"\x1f\x8b")
def test_any_bytes_are_records_or_one_kind_of_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any_bytes"
    path.write_bytes(content)
    records: list[TraceRecord] = []
    with suppress(ConfigError):
        records += read_trace(path)
        assert records, "nothing at all is an error too"
