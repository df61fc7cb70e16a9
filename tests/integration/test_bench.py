"""`kvolt bench` against a real `kvolt serve` with the sim engine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.processes import MODEL, Bench, until

from kvolt.bench.load.report import BenchReport, decode_report

WORKERS = """
[[workers]]
engine = "sim"
model = "sim-tiny"
count = 2
args = {speed = 20, context_length = 2048}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, str]]:
    with Bench(tmp_path_factory.mktemp("served")) as bench:
        (bench.folder / "kvolt.toml").write_text(WORKERS)
        _, url = asyncio.run(bench.serve())
        yield bench, url


def load(served: tuple[Bench, str], out: str, flags: str) -> BenchReport:
    bench, url = served
    done = bench.run("bench", "--url", url, "--out", out, *flags.split())
    assert done.returncode == 0, done.stderr
    return read(bench.folder / out)


def read(folder: Path) -> BenchReport:
    return decode_report((folder / "report.json").read_bytes(), str(folder))


@pytest.mark.parametrize("endpoint", ["chat", "completions", "tokens"])
def test_a_load_is_answered_whole(served: tuple[Bench, str], endpoint: str) -> None:
    report = load(
        served,
        f"load-{endpoint}",
        f"--rate 50 --requests 40 --warmup 4 --input 64 --shared-prefix 48 --output 16 --endpoint {endpoint}",
    )
    assert report.model == MODEL
    assert (report.counts.complete, report.counts.failed, report.counts.warmup) == (40, 0, 4)
    assert report.counts.output_tokens == 40 * 16
    assert report.latencies["itl"].count > 0
    assert report.latencies["ttft"].min > 0
    per_prompt = report.counts.input_tokens / 40
    assert per_prompt == 64 if endpoint == "tokens" else 64 <= per_prompt < 100  # a template adds some


def test_conversations_in_a_closed_loop(served: tuple[Bench, str]) -> None:
    report = load(
        served, "chats", "--concurrency 8 --requests 48 --turns 3 --think 5ms --input 32 --output 8"
    )
    assert (report.counts.complete, report.counts.failed) == (48, 0)
    # The second and third turn carry their history.
    assert report.counts.input_tokens > 48 * 60


async def test_ctrl_c_still_reports(served: tuple[Bench, str]) -> None:
    bench, url = served
    flags = "--concurrency 4 --duration 600s --input 16 --output 8 --drain 10s"
    process = bench.start("bench", "--url", url, "--out", "cut", *flags.split(), name="bench-cut")
    rows = bench.folder / "cut" / "requests.csv"
    await until(lambda: rows.exists() and rows.stat().st_size > 20_000, what="some answers")
    process.send(signal.SIGINT)
    assert await process.ended() == 130
    report = read(bench.folder / "cut")
    assert report.is_interrupted
    assert report.counts.complete > 0
    assert report.counts.failed == 0
    assert "(interrupted)" in process.out
