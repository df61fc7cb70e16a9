"""The page of a twin: the report of `kvolt bench` and what happened inside, in rows, JSON and HTML."""

from __future__ import annotations

from msgspec.structs import replace
from tests.unit.twin.test_inside import ENGINE, ONE, record, reported

from kvolt.bench.load.report import decode_report, encode_report
from kvolt.twin.page import twin_page
from kvolt.twin.report_text import cluster_rows, period_rows, reason_rows, worker_rows, worst_rows


def test_rows_tell_what_it_cost_and_how_it_was_used() -> None:
    settings = replace(ONE, num_workers=2, gpus_per_worker=4, router="least-loaded")
    report = reported(settings, [record(0), record(1000), record(2000, tokens=600)], "ttft=300ms")
    told = dict(cluster_rows(report))
    assert told["workers"] == "2, 4 GPU each, least-loaded"
    assert told["GPU-seconds"].startswith(f"{report.twin.gpu_seconds:.1f}, busy")
    assert told["hit rate, device"] == "0.0 % of input tokens (0)"
    assert told["preemptions"] == "0"
    assert "busy, least and most loaded worker" in told
    header, *periods = period_rows(report)
    assert header == ["from", "workers busy", "running", "waiting", "KV used"]
    assert 5 <= len(periods) <= 12
    assert periods[0][0] == "0.00 s"
    assert [row[0] for row in worker_rows(report)] == ["worker", "w0", "w1"]
    assert [row[:2] for row in reason_rows(report)[1:]] == [["prompt", "1"]]
    [header, worst] = worst_rows(report)
    assert len(header) == len(worst)
    assert dict(zip(header, worst, strict=True))["missed"].startswith("ttft ")


def test_of_very_many_workers_the_first_are_shown() -> None:
    report = reported(replace(ONE, num_workers=40), [record(0)])
    rows = worker_rows(report)
    assert len(rows) == 34
    assert rows[-1][0] == "and 8 more"


def test_a_run_of_nothing_can_be_told() -> None:
    report = reported(ONE, [])
    assert period_rows(report)[1:] == []
    assert reason_rows(report)[1:] == []
    assert "GPU-seconds per complete request" not in dict(cluster_rows(report))
    assert "<h2>Cluster</h2>" in twin_page(report)


def test_whoever_reads_reports_of_bench_reads_it() -> None:
    report = reported(ONE, [record(0), record(10)], "ttft=1ms")
    plain = decode_report(encode_report(report), "report.json")
    assert plain.counts == report.counts
    assert plain.latencies == report.latencies


def test_the_page_has_all_of_it() -> None:
    engine = replace(ENGINE, context_length=1000)
    report = reported(replace(ONE, engine=engine), [record(0), record(0, tokens=2000)], "ttft=1ms")
    page = twin_page(report)
    for words in (
        "on virtual time",
        "<h2>Cluster</h2>",
        "Workers busy, KV blocks used",
        "Requests at workers",
        "<h2>Workers</h2>",
        "Missed the SLA: 2",
        "no complete response",
        "Worst requests",
        "First token, by when it was due",
    ):
        assert words in page
    assert page.count("<svg") == page.count("</svg>") >= 8
    assert "Missed" not in twin_page(reported(ONE, [record(0)]))
