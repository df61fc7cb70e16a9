"""The benchmark with real processes: what is asked, ratios within a round, and what did not start is said."""

from __future__ import annotations

import argparse

from benchmarks.router.processes import CASES, LATENCY, ROUND_ROBIN, Row, _bench_command, report

from kvolt.cli.bench import command as bench


def test_what_is_asked_is_a_command_of_kvolt() -> None:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    for case in CASES.values():
        parsed = parser.parse_args(_bench_command("http://127.0.0.1:1", case, 1)[2:])
        assert parsed.turns == case.turns
        assert parsed.requests == case.requests


def test_ratios_are_of_a_round_and_what_is_missing_is_said() -> None:
    rows = [
        Row(number, "sim", router, ttft, ttft, 2 * ttft, 0.5, 2.0, 10, 0)
        for number, (theirs, ours) in enumerate([(300.0, 100.0), (800.0, 200.0)])
        for router, ttft in ((ROUND_ROBIN, theirs), (LATENCY, ours))
    ]
    rows.append(Row(0, "native", ROUND_ROBIN, error="no such model"))
    text = report(rows)
    assert "goal met     sim: less TTFT (mean) than with round-robin: 3.50 (3.00..4.00) times less" in text
    assert "missing: native with round-robin: no such model" in text
    slower = [rows[0], Row(0, "sim", LATENCY, 310.0, 310.0, 620.0, 0.5, 2.0, 10, 0)]
    assert "goal missed  sim: less TTFT (mean)" in report(slower)
