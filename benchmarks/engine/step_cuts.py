"""Gaps between tokens while prompts are computed: kvolt on this CPU, steps cut by predicted time against not cut.

    python -m benchmarks.engine.step_cuts                 # kept as results/step_cuts.json and .txt; ten minutes

For a machine that does nothing else. `kvolt serve` with a prefill and a decode worker and the defaults (SmolLM2-135M),
then `kvolt bench --concurrency 8 --requests 24 --input 256 --output 48`; a fresh server for each run, in turn.
`cut` is the default. `whole` serves with `measure_steps = false`: without a step model only tokens limit a step (and
the router has no predictions either, so more prompts may be computed by the decode worker). The goal is a p99 gap below
three times the p50 at the same tokens per second. Steps are those of both workers, from their step logs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from benchmarks.harness import Figure, parser_for, report, row_table, run, say
from benchmarks.processes import System, output_of, served, small_model

from kvolt.bench.load.report import decode_report
from kvolt.core.load import StepStats

SYSTEMS = {"cut": {}, "whole": {"measure_steps": "false"}}
_LOAD: tuple[str, ...] = (
    "--concurrency",
    "8",
    "--requests",
    "24",
    "--warmup",
    "2",
    "--input",
    "256",
    "--output",
    "48",
)
_SMOKE_LOAD = ("--concurrency", "2", "--requests", "4", "--input", "32", "--output", "8")


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
    """Longest step with a chunk of a prompt and decoding sequences."""
    longest_step_ms: float
    largest_chunk: int
    num_failed: int


def measure(model: str, folder: Path, load: Sequence[str], system: str, number: int) -> Row:
    steps_path = folder / f"steps-{system}-{number}.jsonl"
    arguments = {"step_log": str(steps_path), **SYSTEMS[system]}
    with served(System(model=model, workers=2, prefill=1, arguments=arguments)) as url:
        bench = ["kvolt", "bench", "--url", url, *load, "--seed", str(number), "--quiet", "--json"]
        report = decode_report(output_of(bench), "the report of kvolt bench")
    steps = list(read_steps(steps_path.read_bytes().splitlines()))
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


FIGURES = (
    Figure("system", "system", ""),
    Figure("round", "round", ""),
    Figure("tokens/s", "tokens_per_s", ".1f"),
    Figure("gap p50", "gap_p50_ms", ".0f"),
    Figure("p99", "gap_p99_ms", ".0f"),
    Figure("max", "gap_max_ms", ".0f"),
    Figure("p99/p50", lambda row: row.gap_p99_ms / max(row.gap_p50_ms, 1e-9), ".1f"),
    Figure("ttft p50", "ttft_p50_ms", ".0f"),
    Figure("p99", "ttft_p99_ms", ".0f"),
    Figure("longest shared step", "longest_shared_step_ms", ".0f"),
    Figure("step", "longest_step_ms", ".0f"),
    Figure("chunk", "largest_chunk", ""),
)


def main() -> int:
    options = parser_for(__file__, __doc__).parse_args()
    rounds, systems, load, rows = 3, list(SYSTEMS), _LOAD, list[Row]()
    if options.smoke:
        rounds, systems, load = 1, ["whole"], _SMOKE_LOAD
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), options.smoke)
        for number in range(rounds):
            for system in systems:
                rows.append(measure(model, Path(folder), load, system, number))
                say(str(rows[-1]))
    report(options, f"{row_table(FIGURES, rows)}\ntimes in ms", {"rows": rows})
    return 1 if any(row.num_failed for row in rows) else 0


if __name__ == "__main__":
    run(main)
