"""`kvolt trace`: its verbs from end to end, on the trace that it makes itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvolt.bench.traces import PUBLIC_TRACES, read_trace, small_trace
from kvolt.cli.main import main


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVOLT_TRACES", raising=False)


@pytest.fixture
def small(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["trace", "make", "small.jsonl", "--recipe", "small"]) == 0
    assert capsys.readouterr().out == "300 requests in small.jsonl, 3.02/s over 99.4 s\n"
    return "small.jsonl"


def test_the_small_trace_is_a_recipe(small: str) -> None:
    assert list(read_trace(small)) == small_trace()


def test_analyze_tells_a_page_or_json(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "analyze", small, "--lru", "64,1024"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("requests       300 in ")
    for word in (
        "input tokens",
        "output tokens",
        "turns",
        "reuse distance",
        "LRU        64",
        "unbounded",
        "sessions",
    ):
        assert word in page
    assert main(["trace", "analyze", small, "--lru", "64,1024", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 300
    assert [each["blocks"] for each in found["reuse"]["lru"]] == [64, 1024]
    assert f"{found['reuse']['hit_rate']:.1%} of blocks" in page


def test_analyze_says_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    assert main(["trace", "analyze", "t.csv"]) == 0
    assert "prefix reuse   not known: the trace has no hash ids" in capsys.readouterr().out


def test_convert_changes_what_it_is_told(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--speed 2 --limit 20 --block-size 64 --sample 0.5 --seed 3 --max-total 700 --min-output 5 --renumber"
    )
    assert main(["trace", "convert", small, "out.jsonl.gz", *flags.split()]) == 0
    found = list(read_trace("out.jsonl.gz"))
    span_s = (found[-1].timestamp - found[0].timestamp) / 1000
    rate = f"{20 / span_s:.3g}/s over {span_s:.1f} s"
    assert capsys.readouterr().out == f"20 requests in out.jsonl.gz, {rate}\n"
    by_length = {(each.input_length, each.output_length): each for each in small_trace()}
    for each in found:
        assert each.block_size == 64
        assert each.output_length >= 5
        assert each.input_length + each.output_length <= 700
        origin = by_length[each.input_length, each.output_length]
        assert each.timestamp == pytest.approx(origin.timestamp / 2, abs=0.001)
    assert found[0].hash_ids == tuple(range(len(found[0].hash_ids)))


def test_convert_cuts_by_time(small: str) -> None:
    assert main(["trace", "convert", small, "out.jsonl", "--start", "10", "--end", "20"]) == 0
    found = list(read_trace("out.jsonl"))
    within = [each for each in small_trace() if 10_000 <= each.timestamp < 20_000]
    assert len(found) == len(within)
    assert found[0].timestamp == 0
    assert found[-1].timestamp == pytest.approx(within[-1].timestamp - within[0].timestamp, abs=0.001)


def test_convert_sorts(capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"timestamp": %d, "input_length": 70, "output_length": 1, "hash_ids": [1, 2]}\n'
    Path("t.jsonl").write_text(line % 5 + line % 3)
    convert = ["trace", "convert", "t.jsonl", "o.jsonl", "--trace-block-size", "64"]
    assert main(convert) == 2
    assert capsys.readouterr().err == (
        "kvolt: t.jsonl:2: timestamp 3 is before 5 of line 1 (`kvolt trace convert --sort` sorts records)\n"
    )
    assert not Path("o.jsonl").exists()
    assert main([*convert, "--sort"]) == 0
    assert [each.timestamp for each in read_trace("o.jsonl")] == [3, 5]


def test_make_follows_its_flags() -> None:
    flags = (
        "--requests 40 --seed 5 --rate 100 --burstiness 0.5 --turns 2 --think 1 --system-prompts 1"
        " --system-tokens 64 --question-tokens 10 --answer-tokens 5 --max-context 4096 --block-size 32"
    )
    assert main(["trace", "make", "a.jsonl", *flags.split()]) == 0
    assert main(["trace", "make", "b.jsonl", *flags.split()]) == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    found = list(read_trace("a.jsonl"))
    assert len(found) == 40
    assert {each.block_size for each in found} == {32}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("analyze nowhere", "nowhere: No such file or directory (choose a readable trace file)"),
        ("analyze t --lru 5,x", "--lru 5,x: 'x' is not a whole number above 0 (as in --lru 1000,20000)"),
        ("convert t o --speed 0", "speed 0 is not above 0"),
        ("convert t o --sample 2", "sample 2 is not between 0 and 1"),
        ("convert t o --block-size 0", "argument --block-size: '0' is not a whole number above 0"),
        ("convert t o --limt 3", "unknown flag --limt; did you mean --limit?"),
        ("make o --turns 0", "turns must be at least 1"),
        ("make o --answer-tokens 0", "--answer-tokens 0 is under 1"),
        ("make o --recipe smal", "unknown choice smal; did you mean small?"),
        ("make nowhere/o", "No such file or directory (choose a writable file)"),
    ],
)
def test_wrong_commands_exit_with_two(capsys: pytest.CaptureFixture[str], argv: str, told: str) -> None:
    Path("t").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    assert main(["trace", *argv.split()]) == 2
    assert told in capsys.readouterr().err


def test_sources_tell_and_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["trace", "sources"]) == 0
    told = capsys.readouterr().out
    for trace in PUBLIC_TRACES:
        assert all(fact in told for fact in (trace.name, trace.url, trace.licence, trace.sha256))
    assert "Set KVOLT_TRACES" in told
    monkeypatch.setenv("KVOLT_TRACES", ".")
    assert main(["trace", "sources"]) == 0
    assert capsys.readouterr().out.count("not found") == len(PUBLIC_TRACES)
    Path("conversation_trace.jsonl").write_text("another file")
    assert main(["trace", "sources"]) == 1
    assert "conversation_trace.jsonl: checksum mismatch" in capsys.readouterr().out
    assert main(["trace", "sources", "--json"]) == 1
    states = [each["state"] for each in json.loads(capsys.readouterr().out)]
    assert states == ["differs", "missing"]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"kvolt trace {verb} " in told for verb in ("analyze", "convert", "make", "sources"))
    assert main(["trace", "convert", "--help"]) == 0
    assert "preserving shared prefixes" in " ".join(capsys.readouterr().out.split())
