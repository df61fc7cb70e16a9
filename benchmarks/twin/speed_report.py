"""Figures of the twin and its peer as people read them: tables and goals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.harness import goal, spread, table
from benchmarks.twin.replays import KVOLT, LATENCIES, PEER, STATISTICS, Replayed
from benchmarks.twin.scaling import Scaled

GOAL_WALL_S = 20.0
GOAL_RSS_BYTES = 1 << 30
GOAL_SAME = 0.05
GOAL_GROWTH = 1.3
_SAME_MS = 0.01
_MIB = 1 << 20

_COSTS: tuple[tuple[str, Callable[[Replayed], float], str], ...] = (
    ("wall seconds", lambda row: row.used.wall_s, ".2f"),
    ("CPU seconds", lambda row: row.used.cpu_s, ".2f"),
    ("peak RSS MiB", lambda row: row.used.peak_rss_bytes / _MIB, ".0f"),
)


def text(trace: str, replays: Sequence[Replayed], scaled: Sequence[Scaled]) -> str:
    if not any(row.system == PEER for row in replays):
        return "\n\n".join([f"trace: {trace}", f"missing: {PEER}", _growth(scaled)])
    return "\n\n".join([f"trace: {trace}", _costs(replays), _answers(replays), _growth(scaled)])


def _costs(replays: Sequence[Replayed]) -> str:
    ours, theirs = ([row for row in replays if row.system == system] for system in (KVOLT, PEER))
    body = []
    for name, of, form in _COSTS:
        pair = [[of(row) for row in rows] for rows in (ours, theirs)]
        ratio = spread([mine / other for mine, other in zip(*pair, strict=True)])
        body.append((name, *(spread(values).text(form) for values in pair), ratio.text()))
    alone = spread([row.replay_s for row in theirs if row.replay_s is not None])
    body.append(("replay alone, seconds", "", alone.text(), ""))
    peak = max(row.used.peak_rss_bytes for row in ours)
    wall, their_wall = (spread([row.used.wall_s for row in rows]) for rows in (ours, theirs))
    goals = [
        goal(f"wall time under {GOAL_WALL_S:g} s", wall.median < GOAL_WALL_S, f"{wall.text()} s"),
        goal("faster than the peer", wall.median < their_wall.median, f"{body[0][-1]} of its wall time"),
        goal("memory under 1 GiB", peak < GOAL_RSS_BYTES, f"{peak / _MIB:.0f} MiB"),
    ]
    return "\n".join([table(("8 workers, one core", KVOLT, PEER, f"{KVOLT} / {PEER}"), body), *goals])


def _answers(replays: Sequence[Replayed]) -> str:
    """Of the first run of each: a simulation says the same each time."""
    ours, theirs = (next(row for row in replays if row.system == system) for system in (KVOLT, PEER))
    body, differences = [], []
    for name in LATENCIES:
        for statistic in STATISTICS:
            mine, other = ours.latencies[name][statistic], theirs.latencies[name][statistic]
            differences.append(mine / other - 1.0)
            body.append((f"{name} {statistic} ms", f"{mine:.2f}", f"{other:.2f}", f"{differences[-1]:+.1%}"))
    points = 100 * (ours.hit_rate - theirs.hit_rate)
    body.append(("found in cache", f"{ours.hit_rate:.2%}", f"{theirs.hit_rate:.2%}", f"{points:+.2f} points"))
    for label, mine_of, theirs_of in (
        ("whole answers", ours.num_whole, theirs.num_whole),
        ("output tokens", ours.output_tokens, theirs.output_tokens),
    ):
        body.append((label, str(mine_of), str(theirs_of), "" if mine_of == theirs_of else "differ"))
    largest = max(differences, key=abs)
    is_same = abs(largest) <= GOAL_SAME and ours.num_whole == theirs.num_whole
    told = goal(f"same latencies within {GOAL_SAME:.0%}", is_same, f"at most {largest:+.1%}")
    stays = all(
        _is_near(row.latencies, first.latencies)
        for first in (ours, theirs)
        for row in replays
        if row.system == first.system
    )
    repeated = "equal in all rounds" if stays else "NOT equal in all rounds"
    return "\n".join([table(("", KVOLT, PEER, "difference"), body), told, f"latencies of each: {repeated}"])


def _is_near(one: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> bool:
    """But for the order in which a sum was made."""
    return all(
        math.isclose(one[name][statistic], other[name][statistic], rel_tol=1e-9)
        for name in one
        for statistic in one[name]
    )


def _growth(scaled: Sequence[Scaled]) -> str:
    sizes = sorted({row.num_workers for row in scaled})
    small, large = ([row for row in scaled if row.num_workers == size] for size in sizes)
    body = [
        (
            str(rows[0].num_workers),
            str(rows[0].num_requests),
            spread([row.cpu_us_per_request for row in rows]).text(".0f"),
            f"{max(row.peak_rss_bytes for row in rows) / _MIB:.0f}",
            f"{rows[0].mean_ttft_ms:.3f}",
            f"{rows[0].mean_e2e_ms:.3f}",
        )
        for rows in (small, large)
    ]
    ratio = spread(
        [many.cpu_us_per_request / few.cpu_us_per_request for few, many in zip(small, large, strict=True)]
    )
    apart = max(
        abs(small[0].mean_ttft_ms - large[0].mean_ttft_ms), abs(small[0].mean_e2e_ms - large[0].mean_e2e_ms)
    )
    head = "workers | requests | CPU us per request | peak RSS MiB | ttft mean ms | e2e mean ms"
    return "\n".join(
        [
            table(head, body),
            goal(
                f"a request on {sizes[1]} workers costs less than {GOAL_GROWTH:g} x one on {sizes[0]}",
                ratio.median < GOAL_GROWTH,
                ratio.text(),
            ),
            goal("the same latencies on both", apart <= _SAME_MS, f"means {apart:.4f} ms apart"),
        ]
    )
