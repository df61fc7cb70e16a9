"""`kvolt bench` as one of the load generators."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.load.client import Delay, Load, Seen

from kvolt.bench.load.histogram import Summary
from kvolt.bench.load.report import decode_report

NAME = "kvolt bench"


class KvoltBench:
    name = NAME

    def command(self, load: Load, folder: Path) -> list[str]:
        pace = (
            ("--concurrency", str(load.concurrency))
            if load.concurrency is not None
            else ("--rate", str(load.rate), "--arrivals", "constant")
        )
        return [
            *(sys.executable, "-m", "kvolt", "bench", "--quiet", "--json"),
            *("--url", f"http://127.0.0.1:{load.port}", "--model", load.model, *pace),
            *("--requests", str(load.requests)),
            *("--input", str(load.input_tokens), "--output", str(load.output_tokens)),
        ]

    def environ(self) -> dict[str, str]:
        return {}

    def seen(self, folder: Path, stdout: bytes) -> Seen:
        report = decode_report(stdout, self.name)
        counts, latencies = report.counts, report.latencies
        return Seen(
            answers=counts.complete,
            failed=counts.failed + counts.interrupted,
            output_tokens=counts.output_tokens,
            input_tokens=counts.input_tokens / max(1, counts.complete),
            first=_delay(latencies["ttft"]),
            gap=_delay(latencies["itl"]) if latencies["itl"].count else None,
            per_token=_delay(latencies["tpot"]) if latencies["tpot"].count else None,
        )


def _delay(summary: Summary) -> Delay:
    return Delay(summary.p50 * 1e3, summary.p90 * 1e3)
