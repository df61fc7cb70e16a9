"""Aggregated, P/D and conditional as real processes in real time, beside the twin of the same runs.

    python -m benchmarks.disaggregation.real_time              40 minutes; results/real_time.{json,txt}

Run from the repository's root, on an otherwise idle machine. `kvolt serve` runs sim workers that are four times slower
than an H200 with an 8B model, and KV links of a quarter of 25 GB/s: at a quarter of the speed two cores suffice for
frontend, workers and load. Reported times are divided by four. `kvolt bench` sends the requests of the study (see
`study`), 8 s of them in the study's time, at 80 % of the highest rate of the best system in the twin; the first half is
not measured. Every run starts new servers with empty caches. `kept` is the share of requests answered within both
limits. The comparison of systems in the study is valid for real processes if the ratios to aggregated, seed by seed,
equal those of the twin.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from benchmarks.disaggregation.study_runs import (
    AGGREGATED,
    BLOCK_SIZE,
    CONDITIONAL,
    ITL_S,
    NUM_BLOCKS,
    SPLIT,
    TTFT_S,
    Cell,
    Lasting,
    Point,
    Search,
    highest_rates,
    records_of,
    solve,
)
from benchmarks.harness import BrokenRun, goal, in_processes, parser_for, run, say, table
from benchmarks.harness import report as write_report
from benchmarks.processes import System, output_of, served

from kvolt.bench.load.report import BenchReport, decode_report
from kvolt.bench.traces import write_trace

_SYSTEMS = (AGGREGATED, SPLIT, CONDITIONAL)
_LOAD = 0.8
_SPEED = 0.25
"""Speed of the simulated engines, links and load, relative to the study."""
_BENCH_S = 300.0
_WARM_UP = ("--rate", "4", "--requests", "8", "--input", "512", "--output", "4", "--seed", "90")
_LINK_BYTES_PER_S = 25_000_000_000
GOAL_APART = 0.10
"""Between a ratio of real processes and the twin's."""


class Plan(msgspec.Struct, frozen=True):
    cells: tuple[Cell, ...]
    num_seeds: int
    lasting: Lasting
    search: Lasting = Lasting(6.0, 120, 1500)
    systems: tuple[str, ...] = _SYSTEMS


_FULL = Plan(
    (Cell(2, 512, 0.0), Cell(2, 4096, 0.5), Cell(2, 16384, 0.0), Cell(4, 4096, 0.0)),
    2,
    Lasting(8.0, 60, 1500),
)
_SMOKE = Plan((Cell(2, 16384, 0.0),), 1, Lasting(0.3, 6, 6), Lasting(2.0, 16, 16), (SPLIT,))


class Measured(msgspec.Struct, frozen=True):
    """Results of one run, real or in the twin."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    kept: float


class Row(msgspec.Struct, frozen=True):
    point: Point
    twin: Measured
    real: Measured | None = None
    num_failed: int = 0
    error: str = ""


def main() -> int:
    options = parser_for(__file__, __doc__).parse_args()
    plan = _SMOKE if options.smoke else _FULL
    rows = [_row(point) for point in _points(plan)]
    write_report(options, report(rows), {"plan": plan, "rows": rows})
    return 1 if any(row.error for row in rows) else 0


def _points(plan: Plan) -> list[Point]:
    """All cells of a seed before the next seed: a change of the machine's speed affects all cells."""
    searches = [Search(cell, plan.search, precision=0.05 if plan is _FULL else 0.5) for cell in plan.cells]
    points = []
    rates = {
        highest.search.cell: highest
        for highest in in_processes(highest_rates, searches, min(2, len(searches)))
    }
    for seed in range(plan.num_seeds):
        for cell in plan.cells:
            num_prefill = rates[cell].num_prefill
            points += [
                Point(
                    cell,
                    system,
                    0 if system == AGGREGATED else num_prefill,
                    seed,
                    round(_LOAD * rates[cell].full, 3),
                    plan.lasting,
                )
                for system in plan.systems
            ]
    return points


def _row(point: Point) -> Row:
    figures = solve(point).figures
    twin = Measured(
        figures.ttft_p50_ms, figures.ttft_p99_ms, figures.itl_p99_ms, figures.tokens_per_s, figures.kept
    )
    try:
        report = _real(point)
    except BrokenRun as error:
        row = Row(point, twin, error=str(error))
    else:
        row = Row(point, twin, _measured(report), report.counts.failed)
    say(str(row))
    return row


def _real(point: Point) -> BenchReport:
    cell = point.cell
    system = System(
        model="sim-tiny",
        workers=cell.num_workers,
        prefill=point.num_prefill,
        arguments={
            "preset": "h200-llama-8b",
            "speed": _SPEED,
            "context_length": 32_768,
            "block_size": BLOCK_SIZE,
            "kv_blocks": NUM_BLOCKS,
            "link_in_bytes_per_s": _LINK_BYTES_PER_S,
            "link_out_bytes_per_s": _LINK_BYTES_PER_S,
        },
    )
    with (
        tempfile.TemporaryDirectory(prefix="bench-real-time-") as folder,
        served(system, _flags(point)) as url,
    ):
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, records_of(point))
        bench = ["kvolt", "bench", "--url", url, "--endpoint", "tokens", "--quiet"]
        output_of([*bench, *_WARM_UP], _BENCH_S)
        limits = f"ttft={TTFT_S[cell.prompt_tokens] / _SPEED:g}s,tpot={ITL_S / _SPEED:g}s"
        load = ("--trace", str(trace), "--speed", f"{_SPEED:g}", "--warmup", str(point.num_warm))
        answer = output_of([*bench, "--json", *load, "--sla", limits], _BENCH_S)
        return decode_report(answer, "the report of kvolt bench")


def _flags(point: Point) -> list[str]:
    if point.system == AGGREGATED:
        return []
    if point.system == SPLIT:
        return ["--prefill-choice", "threshold"]
    ttft_s, itl_s = TTFT_S[point.cell.prompt_tokens] / _SPEED, ITL_S / _SPEED
    return ["--set", f"frontend.target_ttft_s={ttft_s:g}", "--set", f"frontend.target_itl_s={itl_s:g}"]


def _measured(report: BenchReport) -> Measured:
    ttft, tpot = report.latencies["ttft"], report.latencies["tpot"]
    return Measured(
        1e3 * ttft.p50 * _SPEED,
        1e3 * ttft.p99 * _SPEED,
        1e3 * tpot.p99 * _SPEED,
        report.throughput.output_tokens_per_s / _SPEED,
        report.throughput.good_share or 0.0,
    )


# ---


_SHOWN = (
    ("TTFT p50 ms", "ttft_p50_ms", ",.0f"),
    ("TTFT p99 ms", "ttft_p99_ms", ",.0f"),
    ("ITL p99 ms", "itl_p99_ms", ".1f"),
    ("kept", "kept", ".0%"),
)


def report(rows: Sequence[Row]) -> str:
    body, apart, lines = [], [], []
    whole = sorted((row for row in rows if row.real), key=lambda row: (row.point.cell, row.point.seed))
    base = {(row.point.cell, row.point.seed): row for row in whole if row.point.system == AGGREGATED}
    for row in whole:
        point, ratios = row.point, " / "
        beside = base.get((point.cell, point.seed), row)
        if beside is not row:
            mine, twins = (
                getattr(row, side).itl_p99_ms / getattr(beside, side).itl_p99_ms for side in ("real", "twin")
            )
            apart.append(abs(mine / twins - 1))
            ratios = f"{mine:.2f} / {twins:.2f}"
        cell, split = point.cell, f"{point.num_prefill}:{point.cell.num_workers - point.num_prefill}"
        place = (
            f"{cell.num_workers}",
            f"{cell.prompt_tokens:,}",
            f"{cell.hits:.0%}",
            f"{point.rate_per_s:.1f}",
        )
        name = point.system if point.system == AGGREGATED else f"{point.system} {split}"
        values = [
            f"{getattr(row.real, of):{form}} ({getattr(row.twin, of):{form}})" for _, of, form in _SHOWN
        ]
        body.append((*place, str(point.seed), name, *values, ratios))
    for row in rows:
        where = f"{row.point.cell} {row.point.system}"
        lines += [f"missing: {where}: {row.error}"] if row.error else []
        lines += [f"{where}: {row.num_failed} failed"] if row.num_failed else []
    if apart:
        name = f"ratios of ITL p99 to aggregated's within {GOAL_APART:.0%} of the twin's"
        num_near = sum(each <= GOAL_APART for each in apart)
        value = f"{num_near} of {len(apart)}, worst {max(apart):.0%}"
        lines.append(goal(name, num_near == len(apart), value))
    head = (
        "workers",
        "prompt",
        "hits",
        "req/s",
        "seed",
        "system",
        *(title for title, *_ in _SHOWN),
        "ITL ratio",
    )
    about = (
        "Real processes, in brackets the twin; the last column is ITL p99 beside aggregated's, real / twin."
    )
    return "\n".join([about, table(head, body), *lines])


if __name__ == "__main__":
    run(main)
