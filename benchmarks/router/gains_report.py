"""Figures of routers by load as people read them: tables, comparisons seed by seed, goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from benchmarks.harness import Interval, goal, interval, table
from benchmarks.router.gains_runs import (
    CLASSIC,
    LATENCY,
    LEAST_LOADED,
    MOONCAKE,
    ROUND_ROBIN,
    Figures,
    Found,
    Row,
)

GOAL_LOSS = 0.03
GOAL_GAIN = 3.0
_PEER_KV = "Dynamo, KV router"
CITED = {
    1.0: "cited for its KV router at 1 x: TTFT mean 284 / p99 1,711 ms, 20 % reuse (round-robin 326 / 2,077)",
    4.0: "cited for its KV router at 4 x: TTFT mean 407 / p99 1,959 ms, 17 % reuse (round-robin 479 / 2,811)",
}


class PeerFigures(msgspec.Struct, frozen=True):
    ttft_mean_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    e2e_mean_ms: float
    e2e_p99_ms: float
    hit_rate: float


class PeerRow(msgspec.Struct, frozen=True):
    """One system on the whole trace at one speed; without figures the reason."""

    system: str
    speed: float
    figures: PeerFigures | Figures | None
    error: str = ""


class Figure(msgspec.Struct, frozen=True):
    name: str
    of: Callable[[Figures], float]
    form: str
    more_is_better: bool = False


FIGURES = (
    Figure("TTFT mean ms", lambda figures: figures.ttft_mean_ms, ",.0f"),
    Figure("TTFT p99 ms", lambda figures: figures.ttft_p99_ms, ",.0f"),
    Figure("ITL mean ms", lambda figures: figures.itl_mean_ms, ".2f"),
    Figure("E2E mean ms", lambda figures: figures.e2e_mean_ms, ",.0f"),
    Figure("E2E p99 ms", lambda figures: figures.e2e_p99_ms, ",.0f"),
    Figure("tokens/s", lambda figures: figures.tokens_per_s, ",.0f", more_is_better=True),
    Figure("hit rate %", lambda figures: 100 * figures.hit_rate, ".1f", more_is_better=True),
)
_COMPARED = FIGURES[:6]
"""A hit is worth what it saves, which is in the others."""


class Cell:
    """All seeds of one workload at one load: figures by router, the variants of `classic` by name."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by_name: dict[str, dict[int, Figures]] = {}
        for row in rows:
            self.by_name.setdefault(row.point.name, {})[row.point.seed] = row.figures
        self.num_failed = sum(row.figures.num_failed for row in rows)

    def values(self, name: str, figure: Figure) -> list[float]:
        by_seed = self.by_name[name]
        return [figure.of(by_seed[seed]) for seed in sorted(by_seed)]

    def best_classic(self, figure: Figure) -> str:
        """Best policy in hindsight, by the mean over the same seeds."""
        sign = -1.0 if figure.more_is_better else 1.0
        names = [name for name in self.by_name if name.startswith(CLASSIC)]
        return min(names, key=lambda name: sign * interval(self.values(name, figure)).mean)

    def ratio(self, one: str, other: str, figure: Figure) -> Interval:
        """Ratio of two policies, seed by seed."""
        pairs = zip(self.values(one, figure), self.values(other, figure), strict=True)
        return interval([mine / theirs for mine, theirs in pairs])


def loads_text(
    saturations: Mapping[str, Found], rows: Sequence[Row], reuse: Mapping[str, Sequence[float]]
) -> str:
    """One table per workload: routers by load."""
    parts = []
    for workload, saturated in saturations.items():
        mine = [row for row in rows if row.point.workload == workload]
        parts.append(_workload(workload, saturated, mine, reuse[workload]))
    return "\n\n".join(parts)


def _workload(workload: str, saturated: Found, rows: Sequence[Row], reuse: Sequence[float]) -> str:
    rates = sorted({row.point.rate_per_s for row in rows})
    cells = {rate: Cell([row for row in rows if row.point.rate_per_s == rate]) for rate in rates}
    num_seeds = len({row.point.seed for row in rows})
    one = rows[0].point
    about = (
        f"{workload}: {num_seeds} seeds, {one.num_requests - one.num_warm} requests measured in each; "
        f"round-robin follows up to {saturated.rate_per_s:.1f} requests/s; a single endless cache would find "
        f"{interval([100 * share for share in reuse]).text('.1f')} % of the prompt tokens"
    )
    body, goals = [], []
    for rate, cell in cells.items():
        load = f"{rate / saturated.rate_per_s:.0%}, {rate:.1f}/s"
        names = [
            ROUND_ROBIN,
            LEAST_LOADED,
            *sorted(n for n in cell.by_name if n.startswith(CLASSIC)),
            LATENCY,
        ]
        for name in names:
            cells_of_row = [interval(cell.values(name, figure)).text(figure.form) for figure in FIGURES]
            gain = cell.ratio(ROUND_ROBIN, name, FIGURES[0]).text() if name != ROUND_ROBIN else ""
            body.append((load, name, *cells_of_row, gain))
        if cell.num_failed:
            goals.append(f"{load}: {cell.num_failed} requests failed")
        goals += _loss_goals(load, cell) if workload == MOONCAKE else []
        goals.append(_gain_goal(load, cell))
    head = ("load", "router", *(figure.name for figure in FIGURES), "TTFT gain, mean")
    return "\n".join([about, table(head, body), *goals])


def _loss_goals(load: str, cell: Cell) -> list[str]:
    lines = []
    for figure in _COMPARED:
        best = cell.best_classic(figure)
        ratio = cell.ratio(LATENCY, best, figure)
        loss = 1 - ratio.mean if figure.more_is_better else ratio.mean - 1
        name = f"{load}: {LATENCY} loses at most {GOAL_LOSS:.0%} to {best}, its best, on {figure.name}"
        lines.append(goal(name, loss <= GOAL_LOSS, f"{ratio.text('.3f')} of it"))
    return lines


def _gain_goal(load: str, cell: Cell) -> str:
    gain = cell.ratio(ROUND_ROBIN, LATENCY, FIGURES[0])
    tail = cell.ratio(ROUND_ROBIN, LATENCY, FIGURES[1])
    name = f"{load}: {GOAL_GAIN:g} times less TTFT than round-robin, mean"
    return goal(name, gain.mean >= GOAL_GAIN, f"{gain.text()} (p99 {tail.text()})")


def peer_text(peers: Sequence[PeerRow]) -> str:
    """The whole trace by system and speed."""
    body, lines = [], []
    for row in peers:
        figures = row.figures
        if figures is None:
            lines.append(f"missing: {row.system} at {row.speed:g} x: {row.error}")
            continue
        body.append(
            (
                f"{row.speed:g} x",
                row.system,
                f"{figures.ttft_mean_ms:,.0f}",
                f"{figures.ttft_p99_ms:,.0f}",
                f"{figures.itl_mean_ms:.2f}",
                f"{figures.e2e_mean_ms:,.0f}",
                f"{figures.e2e_p99_ms:,.0f}",
                f"{100 * figures.hit_rate:.1f}",
            )
        )
    body.sort(key=lambda line: line[0])
    for speed, cited in CITED.items():
        by_system = {row.system: row.figures for row in peers if row.speed == speed and row.figures}
        mine, theirs = by_system.get(f"kvolt, {LATENCY}"), by_system.get(_PEER_KV)
        if mine is not None and theirs is not None:
            mean, tail = (
                getattr(mine, name) / getattr(theirs, name) for name in ("ttft_mean_ms", "ttft_p99_ms")
            )
            name = f"at {speed:g} x below the peer's KV router on TTFT mean and p99"
            lines.append(goal(name, max(mean, tail) < 1.0, f"{mean:.3f} and {tail:.3f} of it"))
            best_ms = min(of.e2e_p99_ms for system, of in by_system.items() if system.startswith(_PEER_KV))
            ratios = [mine.e2e_p99_ms / each_ms for each_ms in (theirs.e2e_p99_ms, best_ms)]
            name = f"at {speed:g} x not behind the peer's default and its best load scale on E2E p99"
            lines.append(goal(name, max(ratios) <= 1.0, f"{ratios[0]:.3f} and {ratios[1]:.3f} of it"))
        lines.append(cited)
    head = (
        *(
            "whole trace at",
            "system",
            "TTFT mean ms",
            "TTFT p99 ms",
            "ITL mean ms",
            "E2E mean ms",
            "E2E p99 ms",
        ),
        "hit rate %",
    )
    return "\n".join([table(head, body), *lines])
