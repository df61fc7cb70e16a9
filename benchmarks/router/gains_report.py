"""Tables and goals of the study of routers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from benchmarks.harness import Figure, Rows, cell, goal, table
from benchmarks.router.gains_runs import (
    CLASSIC,
    HITS,
    LATENCIES,
    LATENCY,
    TOKENS,
    Figures,
    Found,
    Row,
)

GOAL_LOSS = 0.03
_PEER_KV = "Dynamo, KV router"
FIGURES = (*LATENCIES, TOKENS, HITS)


class PeerRow(msgspec.Struct, frozen=True):
    """One system on the whole trace at one speed; without figures the reason."""

    system: str
    speed: float
    figures: Figures | None
    error: str = ""


def loads_text(saturated: Found, rows: Sequence[Row]) -> str:
    """Routers by load, each compared to the best weight of `classic`."""
    one, num_seeds = rows[0].point, len({row.point.seed for row in rows})
    about = (
        f"{num_seeds} seeds, {one.num_requests - one.num_warm} requests measured in each; "
        f"round-robin follows up to {saturated.rate_per_s:.1f} requests/s"
    )
    body, goals = [], []
    for rate, at_rate in Rows(rows, by="point.seed").each("point.rate_per_s"):
        load = f"{rate / saturated.rate_per_s:.0%}, {rate:.1f}/s"
        routers = dict(at_rate.each("point.name"))
        body += [(load, name, *mine.cells(FIGURES)) for name, mine in routers.items()]
        if num_failed := sum(row.figures.num_failed for row in at_rate.rows):
            goals.append(f"{load}: {num_failed} requests failed")
        for figure in (*LATENCIES, TOKENS):
            best = _best_classic(routers, figure)
            ratio = routers[LATENCY].ratio(routers[best], figure)
            loss = 1 - ratio.mean if figure is TOKENS else ratio.mean - 1
            name = f"{load}: {LATENCY} loses at most {GOAL_LOSS:.0%} to {best}, its best, on {figure.title}"
            goals.append(goal(name, loss <= GOAL_LOSS, f"{ratio.text('.3f')} of it"))
    return "\n".join([about, table(("load", "router", *(each.title for each in FIGURES)), body), *goals])


def _best_classic(routers: dict[str, Rows[Row]], figure: Figure) -> str:
    """With hindsight: by the mean over these very seeds."""
    sign = -1.0 if figure is TOKENS else 1.0
    names = [name for name in routers if name.startswith(CLASSIC)]
    return min(names, key=lambda name: sign * routers[name].fold(figure).mean)


def peer_text(peers: Sequence[PeerRow]) -> str:
    """The whole trace by speed and system."""
    figures = (*LATENCIES, HITS)
    body, lines = [], [f"missing: {row.system} at {row.speed:g} x: {row.error}" for row in peers if row.error]
    for speed, rows in sorted(Rows([row for row in peers if row.figures]).each("speed")):
        body += [
            (f"{speed:g} x", row.system, *(cell(each.value(row), each.form) for each in figures))
            for row in rows.rows
        ]
        by_system = {row.system: row.figures for row in rows.rows}
        mine, theirs = by_system.get(f"kvolt, {LATENCY}"), by_system.get(_PEER_KV)
        if mine is None or theirs is None:
            continue
        ratios = [mine.ttft_mean_ms / theirs.ttft_mean_ms, mine.ttft_p99_ms / theirs.ttft_p99_ms]
        name = f"at {speed:g} x below the peer's KV router on TTFT mean and p99"
        lines.append(goal(name, max(ratios) < 1.0, f"{ratios[0]:.3f} and {ratios[1]:.3f} of it"))
        best_ms = min(each.e2e_p99_ms for name, each in by_system.items() if name.startswith(_PEER_KV))
        ratios = [mine.e2e_p99_ms / each_ms for each_ms in (theirs.e2e_p99_ms, best_ms)]
        name = f"at {speed:g} x not behind the peer's default and its best load scale on E2E p99"
        lines.append(goal(name, max(ratios) <= 1.0, f"{ratios[0]:.3f} and {ratios[1]:.3f} of it"))
    return "\n".join([table(("whole trace at", "system", *(each.title for each in figures)), body), *lines])
