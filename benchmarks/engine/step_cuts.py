"""Gaps between tokens while prompts are computed: kvolt on this CPU, steps cut by predicted time against not cut.

    python -m benchmarks.engine.step_cuts                 # kept as results/step_cuts.json and .txt; ten minutes
    python -m benchmarks.engine.step_cuts --rounds 1 --out /tmp/try

For a machine that does nothing else. `kvolt serve` with a prefill and a decode worker and the defaults (SmolLM2-135M),
then `kvolt bench --concurrency 8 --requests 24 --input 256 --output 48`; a fresh server for each run, in turn.
`cut` is the default. `whole` serves with `measure_steps = false`: without a step model only tokens limit a step (and
the router has no predictions either, so more prompts may be computed by the decode worker). The goal is a p99 gap below
three times the p50 at the same tokens per second. Steps are those of both workers, from their step logs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from benchmarks.runtime.pair import BrokenRun
from benchmarks.runtime.report import keep_results, machine
from benchmarks.twin.accuracy_runs import STEPS, System, output_of, served

from kvolt.bench.load.report import decode_report
from kvolt.core.load import StepStats

MODEL = "smollm2-135m"
SYSTEMS = {"cut": {}, "whole": {"measure_steps": "false"}}
_LOAD = ("--concurrency", "8", "--requests", "24", "--warmup", "2", "--input", "256", "--output", "48")
_BENCH_S = 900.0
_RESULTS = Path(__file__).parent / "results" / "step_cuts"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in milliseconds."""

    system: str
    round: int
    tokens_per_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    longest_shared_step_ms: float
    """With a chunk of a prompt, while other sequences decode."""
    longest_step_ms: float
    largest_chunk: int
    num_failed: int


def measure(system: str, number: int) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = System(model=MODEL, workers=2, prefill=1, arguments={"step_log": STEPS, **SYSTEMS[system]})
        with served(asked, folder) as url:
            out = folder / "bench"
            output_of(
                ["kvolt", "bench", "--url", url, *_LOAD, "--seed", str(number), "--quiet", "--out", str(out)],
                _BENCH_S,
            )
        report = decode_report((out / "report.json").read_bytes(), "report.json")
        steps = list(read_steps((folder / STEPS).read_bytes().splitlines()))
    gaps, ttft = report.latencies["itl"], report.latencies["ttft"]
    return Row(
        system=system,
        round=number,
        tokens_per_s=report.throughput.output_tokens_per_s,
        gap_p50_ms=1e3 * (gaps.p50 or 0.0),
        gap_p99_ms=1e3 * (gaps.p99 or 0.0),
        gap_max_ms=1e3 * (gaps.max or 0.0),
        ttft_p50_ms=1e3 * (ttft.p50 or 0.0),
        ttft_p99_ms=1e3 * (ttft.p99 or 0.0),
        longest_shared_step_ms=1e3
        * max((step.time_s for step in steps if step.batch and step.prefill_tokens), default=0.0),
        longest_step_ms=1e3 * max((step.time_s for step in steps), default=0.0),
        largest_chunk=max((step.prefill_tokens for step in steps), default=0),
        num_failed=report.counts.failed,
    )


def read_steps(lines: Sequence[bytes]) -> Iterator[StepStats]:
    """Two workers append to one log, so a header may stand anywhere."""
    for line in lines:
        if b'"version"' not in line:
            yield msgspec.json.decode(line, type=StepStats)


def table(rows: Sequence[Row]) -> str:
    head = (
        f"{'system':<8}{'round':>6}{'tokens/s':>10}{'gap p50':>9}{'p99':>8}{'max':>9}{'p99/p50':>9}"
        f"{'ttft p50':>10}{'p99':>9}{'longest shared step':>21}{'step':>9}{'chunk':>7}"
    )
    lines = [head]
    for row in rows:
        lines.append(
            f"{row.system:<8}{row.round:>6}{row.tokens_per_s:>10.1f}{row.gap_p50_ms:>9.0f}{row.gap_p99_ms:>8.0f}"
            f"{row.gap_max_ms:>9.0f}{row.gap_p99_ms / max(row.gap_p50_ms, 1e-9):>9.1f}{row.ttft_p50_ms:>10.0f}"
            f"{row.ttft_p99_ms:>9.0f}{row.longest_shared_step_ms:>21.0f}{row.longest_step_ms:>9.0f}"
            f"{row.largest_chunk:>7}"
        )
    return "\n".join([*lines, "times in ms"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of: " + ", ".join(SYSTEMS))
    parser.add_argument("--out", type=Path, default=_RESULTS, help="without its suffix")
    given = parser.parse_args(argv)
    found, rows = machine(), []
    try:
        for number in range(given.rounds):
            for system in given.systems.split(","):
                rows.append(measure(system, number))
                print(table(rows[-1:]).splitlines()[1], flush=True)
    except BrokenRun as error:
        print(error, file=sys.stderr)
        return 1
    text = table(rows)
    print(text)
    keep_results(given.out, "benchmarks.engine.step_cuts", found, text, {"rows": rows})
    return 1 if any(row.num_failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
