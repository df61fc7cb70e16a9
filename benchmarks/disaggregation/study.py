"""Conditions under which P/D pays, in the twin: aggregated, P/D and conditional on equal GPUs, over 20 seeds.

    python -m benchmarks.disaggregation.study             about an hour on two cores; results/study.{json,txt}

Continues an interrupted run unless kvolt's sources have changed (rows are kept in --folder, KVOLT_BENCH). Times are
virtual: other load on the machine changes only the duration of the study.

Cluster: 2 or 4 workers of one GPU, the timing of an H200 with an 8B model, blocks of 64 tokens, 8,192 each, KV between
workers at 25 GB/s. Prompts of 512, 4,096 and 16,384 tokens, of which 0, 50 and 90 % are a cached prefix of one of eight
groups; answers of 200 tokens on average; random arrivals.

Limits: the first token within 0.2, 0.6 and 2.5 s by length of prompt, and 20 ms between tokens on average. Load: for
each cell, the highest rate at which 90 % of the requests keep both, found by bisection to 5 % for aggregated and for
every split into prefill and decode workers; the highest of these is 100 %. The best split is that of P/D and of
conditional. `P/D` sends a prompt to a prefill worker if a decode worker lacks more than one block of it (with 512
tokens and 90 % hits: no prompt seen before); `conditional` is the default of `kvolt` with these limits as targets.

A run is 6 s of arrivals, half of which are not measured, but at least 120 requests; the same for all systems and for
the search. That is short: answers take some seconds, so that high rates are measured before the load is stationary and
exceed sustainable rates. Tokens/s count the measured seconds only: where answers take longer, more of them are
unfinished at the end.

Conditional's cost of an answer by a prefill worker was selected among four variants, on four of these cells (4 workers,
4,096 and 16,384 tokens, 0 and 50 % hits), and its rule for remote prefill (`journey/slo_gate.py`) among six, on nine of
them, at full load with four other seeds. It learns rates and lengths over seconds, of which a run has few.

A seed determines all arrivals, lengths and groups, the same for the three systems, and all random numbers of network
and router. Intervals are 95 % confidence intervals of the mean over seeds (Student's t); ratios are per seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import msgspec
from benchmarks.disaggregation.study_runs import (
    AGGREGATED,
    CONDITIONAL,
    SPLIT,
    TTFT_S,
    Cell,
    Lasting,
    Point,
    Rates,
    Row,
    Search,
    highest_rates,
    solve,
)
from benchmarks.harness import Figure, Rows, goal, interval, report, run, table
from benchmarks.studies import KeptRows, parse_study, study_parser

LOADS = (1.0, 0.6)


class Plan(msgspec.Struct, frozen=True):
    num_seeds: int
    cells: tuple[Cell, ...]
    lasting: Lasting
    precision: float


_FULL = Plan(
    20, tuple(Cell(*each) for each in product((2, 4), TTFT_S, (0.0, 0.5, 0.9))), Lasting(6.0, 120, 1500), 0.05
)
_SMOKE = Plan(1, (Cell(2, 16384, 0.0),), Lasting(2.0, 16, 16), 0.5)


def main() -> None:
    options = parse_study(study_parser(__file__, __doc__))
    plan = _SMOKE if options.smoke else _FULL
    searched = KeptRows(options.folder, "disaggregation-rates", Rates)
    kept = KeptRows(options.folder, "disaggregation", Row)
    searches = [Search(cell, plan.lasting, precision=plan.precision) for cell in plan.cells]
    highest = searched.solve(highest_rates, searches[::-1], options.processes)  # the longest first
    rates = {each.search.cell: each for each in highest[::-1]}
    rows = kept.solve(solve, _points(plan, rates), options.processes)
    results = {"plan": plan, "rates": list(rates.values()), "rows": rows}
    report(options, text(rates, rows), results)
    for each in (searched, kept):
        each.remove()


def _points(plan: Plan, rates: Mapping[Cell, Rates]) -> list[Point]:
    """The full load first, all cells of a seed before the next: what there is of a study that is not over is worth
    reading."""
    points = []
    for load, seed, (cell, highest) in product(LOADS, range(plan.num_seeds), rates.items()):
        rate = round(load * highest.full, 6)
        points += [
            Point(cell, system, num_prefill, seed, rate, plan.lasting)
            for system, num_prefill in (
                (AGGREGATED, 0),
                (SPLIT, highest.num_prefill),
                (CONDITIONAL, highest.num_prefill),
            )
        ]
    return points


# --- the report

GOAL_LOSS = 0.03

ITL = Figure("ITL p99 ms", "figures.itl_p99_ms", ".1f", interval)
TOKENS = Figure("tokens/s", "figures.tokens_per_s", ",.0f", interval)
GOODPUT = Figure("goodput/s", "figures.goodput_per_s", ".2f", interval)
FIGURES = (
    Figure("TTFT p99 ms", "figures.ttft_p99_ms", ",.0f", interval),
    ITL,
    Figure("longest gap p99 ms", "figures.gap_p99_ms", ",.0f", interval),
    TOKENS,
    Figure("kept %", lambda row: 100 * row.figures.kept, ".1f", interval),
    GOODPUT,
)


def text(rates: Mapping[Cell, Rates], rows: Sequence[Row]) -> str:
    by_workers = Rows(sorted(rows, key=lambda row: row.point.cell), by="point.seed").each(
        "point.cell.num_workers"
    )
    return "\n\n".join(_workers(num_workers, mine, rates) for num_workers, mine in by_workers)


def _workers(num_workers: int, rows: Rows[Row], rates: Mapping[Cell, Rates]) -> str:
    points = [row.point for row in rows.rows]
    nums = [point.num_requests - point.num_warm for point in points]
    about = (
        f"{num_workers} workers: {len({point.seed for point in points})} seeds, "
        f"{min(nums)} to {max(nums)} requests measured in each"
    )
    highest, body, losses, goals = [], [], [], []
    num_met, num_itl, num_runs = 0, 0, 0
    for cell, of_cell in rows.each("point.cell"):
        best = rates[cell]
        split = f"{best.num_prefill}:{num_workers - best.num_prefill}"
        kind = (f"{cell.prompt_tokens:,}", f"{cell.hits:.0%}")
        up_to = (f"{best.aggregated:.1f}", f"{best.split:.1f}", split)
        highest.append((*kind, *up_to, f"{best.split / best.aggregated:.2f}"))
        for rate, at_rate in sorted(of_cell.each("point.rate_per_s")):
            load = f"{rate / best.full:.0%}, {rate:.1f}/s"
            place = f"{cell.prompt_tokens:,} tokens, {cell.hits:.0%} hits, {load}"
            systems = dict(at_rate.each("point.system"))
            better = _better(systems, GOODPUT)
            for name, mine in systems.items():
                title = name if name == AGGREGATED else f"{name} {split}"
                ratio = "better" if name == better else mine.ratio(systems[better], GOODPUT).text()
                body.append((*kind, load, title, *mine.cells(FIGURES), ratio))
            lost, itl = (systems[SPLIT].ratio(systems[AGGREGATED], each) for each in (GOODPUT, ITL))
            if lost.mean < 1 - GOAL_LOSS:
                losses.append(
                    f"P/D loses: {place}: {lost.text()} of aggregated's goodput, {itl.text()} of its ITL p99"
                )
            # Goodput and tokens/s beside the system that has more of it, ITL beside that of the better goodput.
            ours = systems[CONDITIONAL]
            goodput, itl = (ours.ratio(systems[better], each) for each in (GOODPUT, ITL))
            tokens = ours.ratio(systems[_better(systems, TOKENS)], TOKENS)
            is_met = min(goodput.mean, tokens.mean) >= 1 - GOAL_LOSS
            num_runs, num_met, num_itl = num_runs + 1, num_met + is_met, num_itl + (itl.mean <= 1 + GOAL_LOSS)
            shown = [each.text(".3f") for each in (goodput, tokens, itl)]
            value = "goodput {}, tokens/s {}; ITL p99 {} of {}'s".format(*shown, better)
            goals.append(goal(f"{place}: conditional within {GOAL_LOSS:.0%} of the better", is_met, value))
            if num_failed := sum(row.figures.num_failed for row in at_rate.rows):
                goals.append(f"{place}: {num_failed} requests failed")
    return "\n".join(
        [
            about,
            table(
                "prompt | hits | aggregated up to /s | P/D up to /s | best split | P/D / aggregated", highest
            ),
            table(
                ("prompt", "hits", "load", "system", *(each.title for each in FIGURES), "goodput / better"),
                body,
            ),
            *(losses or [f"P/D loses nowhere more than {GOAL_LOSS:.0%} of aggregated's goodput"]),
            *goals,
            f"conditional within {GOAL_LOSS:.0%} of the better on goodput and tokens/s in {num_met} of {num_runs}, "
            f"on ITL p99 in {num_itl} of {num_runs}",
        ]
    )


def _better(systems: Mapping[str, Rows[Row]], figure: Figure) -> str:
    """The better of the two fixed modes, by the mean over the same seeds."""
    return max((AGGREGATED, SPLIT), key=lambda name: systems[name].fold(figure).mean)


if __name__ == "__main__":
    run(main)
