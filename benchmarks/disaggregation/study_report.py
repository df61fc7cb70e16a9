"""The study of disaggregation as people read it: a table by number of workers, where P/D loses, and the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from benchmarks.disaggregation.study_runs import (
    AGGREGATED,
    CONDITIONAL,
    SPLIT,
    Cell,
    Figures,
    Rates,
    Row,
)
from benchmarks.harness import Interval, goal, interval, table

SYSTEMS = (AGGREGATED, SPLIT, CONDITIONAL)
GOAL_LOSS = 0.03


class Figure(msgspec.Struct, frozen=True):
    name: str
    of: Callable[[Figures], float]
    form: str


GOODPUT = Figure("goodput/s", lambda figures: figures.goodput_per_s, ".2f")
TOKENS = Figure("tokens/s", lambda figures: figures.tokens_per_s, ",.0f")
ITL = Figure("ITL p99 ms", lambda figures: figures.itl_p99_ms, ".1f")
FIGURES = (
    Figure("TTFT p99 ms", lambda figures: figures.ttft_p99_ms, ",.0f"),
    ITL,
    Figure("longest gap p99 ms", lambda figures: figures.gap_p99_ms, ",.0f"),
    TOKENS,
    Figure("kept %", lambda figures: 100 * figures.kept, ".1f"),
    GOODPUT,
)


# --- figures


class Runs:
    """All seeds of one cell at one rate, by system."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.cell = rows[0].point.cell
        self.rate_per_s = rows[0].point.rate_per_s
        self.num_failed = sum(row.figures.num_failed for row in rows)
        self._by_system: dict[str, dict[int, Figures]] = {system: {} for system in SYSTEMS}
        for row in rows:
            self._by_system[row.point.system][row.point.seed] = row.figures

    def values(self, system: str, figure: Figure) -> list[float]:
        by_seed = self._by_system[system]
        return [figure.of(by_seed[seed]) for seed in sorted(by_seed)]

    def mean(self, system: str, figure: Figure) -> Interval:
        return interval(self.values(system, figure))

    def better(self, figure: Figure) -> str:
        """Of the two that always do the same, by the mean over these very seeds."""
        return max((AGGREGATED, SPLIT), key=lambda system: self.mean(system, figure).mean)

    def ratio(self, one: str, other: str, figure: Figure) -> Interval:
        """Of one to the other, seed by seed; where the other has nothing, of the means."""
        mine, theirs = self.values(one, figure), self.values(other, figure)
        if min(theirs) > 0:
            return interval([a / b for a, b in zip(mine, theirs, strict=True)])
        return Interval(sum(mine) / sum(theirs) if sum(theirs) else float("inf"), 0.0)


def text(rates: Mapping[Cell, Rates], rows: Sequence[Row]) -> str:
    cells = sorted({row.point.cell for row in rows})
    return "\n\n".join(
        _workers(num_workers, [cell for cell in cells if cell.num_workers == num_workers], rates, rows)
        for num_workers in sorted({cell.num_workers for cell in cells})
    )


def _workers(
    num_workers: int, cells: Sequence[Cell], rates: Mapping[Cell, Rates], rows: Sequence[Row]
) -> str:
    points = [row.point for row in rows if row.point.cell.num_workers == num_workers]
    nums = [point.num_requests - point.num_warm for point in points]
    about = (
        f"{num_workers} workers: {len({point.seed for point in points})} seeds, "
        f"{min(nums)} to {max(nums)} requests measured in each"
    )
    body, runs = [], []
    for cell in cells:
        mine = [row for row in rows if row.point.cell == cell]
        for rate in sorted({row.point.rate_per_s for row in mine}):
            run = Runs([row for row in mine if row.point.rate_per_s == rate])
            runs.append(run)
            body += _lines(run, rates)
    head = (
        *("prompt", "hits", "load", "system"),
        *(figure.name for figure in FIGURES),
        "goodput / better",
    )
    return "\n".join(
        [
            about,
            _rate_table(cells, rates),
            table(head, body),
            *_where_split_loses(runs, rates),
            *_goals(runs, rates),
        ]
    )


def _rate_table(cells: Sequence[Cell], rates: Mapping[Cell, Rates]) -> str:
    """Requests per second up to which the limits are kept."""
    body = []
    for cell in cells:
        found = rates[cell]
        split = f"{found.num_prefill}:{cell.num_workers - found.num_prefill}"
        values = (
            f"{found.aggregated:.1f}",
            f"{found.split:.1f}",
            split,
            f"{found.split / found.aggregated:.2f}",
        )
        body.append((f"{cell.prompt_tokens:,}", f"{cell.hits:.0%}", *values))
    head = "prompt | hits | aggregated up to /s | P/D up to /s | best split | P/D / aggregated"
    return table(head, body)


def _load(run: Runs, rates: Mapping[Cell, Rates]) -> str:
    return f"{run.rate_per_s / rates[run.cell].full:.0%}, {run.rate_per_s:.1f}/s"


def _place(run: Runs, rates: Mapping[Cell, Rates]) -> str:
    return f"{run.cell.prompt_tokens:,} tokens, {run.cell.hits:.0%} hits, {_load(run, rates)}"


def _lines(run: Runs, rates: Mapping[Cell, Rates]) -> list[tuple[str, ...]]:
    better = run.better(GOODPUT)
    num_prefill = rates[run.cell].num_prefill
    split = f"{num_prefill}:{run.cell.num_workers - num_prefill}"
    lines = []
    for system in SYSTEMS:
        values = [run.mean(system, figure).text(figure.form) for figure in FIGURES]
        ratio = run.ratio(system, better, GOODPUT).text() if system != better else "better"
        name = system if system == AGGREGATED else f"{system} {split}"
        place = (f"{run.cell.prompt_tokens:,}", f"{run.cell.hits:.0%}", _load(run, rates))
        lines.append((*place, name, *values, ratio))
    return lines


def _where_split_loses(runs: Sequence[Runs], rates: Mapping[Cell, Rates]) -> list[str]:
    told = []
    for run in runs:
        ratio = run.ratio(SPLIT, AGGREGATED, GOODPUT)
        if ratio.mean < 1 - GOAL_LOSS:
            itl = run.ratio(SPLIT, AGGREGATED, ITL)
            told.append(
                f"P/D loses: {_place(run, rates)}: {ratio.text()} of aggregated's goodput, {itl.text()} of its ITL p99"
            )
    return told or [f"P/D loses nowhere more than {GOAL_LOSS:.0%} of aggregated's goodput"]


def _goals(runs: Sequence[Runs], rates: Mapping[Cell, Rates]) -> list[str]:
    """On goodput and tokens/s beside whichever has more of it; ITL is told beside who has the better goodput."""
    told, num_met, num_itl = [], 0, 0
    for run in runs:
        better = run.better(GOODPUT)
        goodput = run.ratio(CONDITIONAL, better, GOODPUT)
        tokens = run.ratio(CONDITIONAL, run.better(TOKENS), TOKENS)
        itl = run.ratio(CONDITIONAL, better, ITL)
        is_met = min(goodput.mean, tokens.mean) >= 1 - GOAL_LOSS
        num_met += is_met
        num_itl += itl.mean <= 1 + GOAL_LOSS
        name = f"{_place(run, rates)}: conditional within {GOAL_LOSS:.0%} of the better"
        value = (
            f"goodput {goodput.text('.3f')}, tokens/s {tokens.text('.3f')}; "
            f"ITL p99 {itl.text('.3f')} of {better}'s"
        )
        told.append(goal(name, is_met, value))
        if run.num_failed:
            told.append(f"{_place(run, rates)}: {run.num_failed} requests failed")
    return [
        *told,
        f"conditional within {GOAL_LOSS:.0%} of the better on goodput and tokens/s in {num_met} of {len(runs)}, "
        f"on ITL p99 in {num_itl} of {len(runs)}",
    ]
