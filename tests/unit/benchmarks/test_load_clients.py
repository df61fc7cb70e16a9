"""The benchmark of load generators: what is compared is what was measured; the canned server says what it was asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from benchmarks.load import canned
from benchmarks.load import clients as report
from benchmarks.load.clients import asked_of
from benchmarks.load.generators import AIPERF as PEER
from benchmarks.load.generators import KVOLT, Aiperf, Seen
from benchmarks.load.metered import Usage

from kvolt.bench.load.answer import AnswerReader
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.client_call import Timeouts
from kvolt.runtime.http.server_url import ServerUrl


def cost(client: str, cpu_s: float, number: int = 1) -> report.CostRow:
    """A token costs what is over half a second."""
    long, short = report.Cost(2 * cpu_s, cpu_s, 1010), report.Cost(1.0, 0.5, 10)
    return report.CostRow(number, client, "load", long, short)


def test_a_token_costs_what_the_long_run_uses_more() -> None:
    row = cost(KVOLT, 0.6)
    assert row.cpu_us_per_token == pytest.approx(100.0)
    assert report._WHOLE.value(row) == pytest.approx(1.2 / 1010 * 1e6)


def test_ratios_are_of_one_round() -> None:
    rows = [cost(KVOLT, 0.6, 1), cost(PEER, 1.5, 1), cost(PEER, 4.5, 2), cost(KVOLT, 0.7, 2)]
    text = report.cost_text(rows)
    assert "goal met" in text
    assert "(0.050..0.100)" in text
    assert "goal missed" in report.cost_text([cost(KVOLT, 0.9), cost(PEER, 1.5)])


@pytest.mark.parametrize(("peak", "failed", "met"), [(50, 0, True), (49, 0, False), (50, 1, False)])
def test_many_streams_are_many_only_at_once_and_whole(peak: int, failed: int, met: bool) -> None:
    many = report.ManyRow(50, peak, 50 - failed, failed, 2.0, 1 << 20, cost(KVOLT, 0.6))
    assert ("goal met" in report.many_text(many)) is met


def test_cpu_before_the_work_is_left_out() -> None:
    used = Usage(0, 10.0, 5.0, 1, [(100.0, 0.0), (101.0, 4.0), (102.0, 6.0), (103.0, 9.0)])
    assert used.cpu_s_from(101.5) == pytest.approx(5.0)
    with pytest.raises(ValueError, match="nothing was looked at"):
        used.cpu_s_from(99.0)


def test_the_meter_counts_orphans_too(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {spin!r}])"
    result = tmp_path / "used.json"
    command = [sys.executable, "-m", "benchmarks.load.metered", str(result), sys.executable, "-c", orphan]
    subprocess.run(command, check=True)
    used = msgspec.json.decode(result.read_bytes(), type=Usage)
    assert used.status == 0
    assert used.cpu_s > 0.3
    assert used.looks[-1][1] == used.cpu_s
    assert used.looks == sorted(used.looks)


def test_what_aiperf_reports(tmp_path: Path) -> None:
    figures = {"request_count": {"avg": 4.0}, "total_osl": {"avg": 40.0}}
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "profile_export_aiperf.json").write_bytes(msgspec.json.encode(figures))
    assert Aiperf(tmp_path).seen(tmp_path, b"") == Seen(answers=4, failed=0, output_tokens=40)


@asynccontextmanager
async def serving(period_s: float) -> AsyncIterator[int]:
    wheel, counts = canned.Wheel(period_s) if period_s else None, canned.Counts()
    server = await asyncio.get_running_loop().create_server(
        lambda: canned.Stream(wheel, counts), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("period_s", [0.0, 0.002])
async def test_canned_answers_are_as_long_as_asked(period_s: float) -> None:
    answer = AnswerReader(lambda gap, times: None)
    body = b'{"max_completion_tokens": 5}'
    async with (
        serving(period_s) as port,
        HttpClient(ServerUrl.parse(f"127.0.0.1:{port}")) as client,
        client.open("/v1/chat/completions", body, Timeouts(5.0, 5.0)) as response,
    ):
        async for piece in response:
            answer.feed([piece], 0.0)
    assert (answer.num_events, answer.finish_reason, answer.done) == (5, "length", True)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_the_canned_server_counts_its_streams() -> None:
    async with (
        serving(0.002) as port,
        HttpClient(ServerUrl.parse(f"127.0.0.1:{port}")) as client,
        AsyncExitStack() as stack,
    ):
        calls = [
            client.open("/v1/chat/completions", b'{"max_tokens": 9}', Timeouts(5.0, 5.0)) for _ in range(3)
        ]
        for response in [await stack.enter_async_context(call) for call in calls]:
            async for _ in response:
                pass
        first, second = [await asyncio.to_thread(asked_of, port) for _ in range(2)]
    assert (first.peak, second.peak) == (3, 0)
    assert 0.0 == second.began_s < first.began_s
