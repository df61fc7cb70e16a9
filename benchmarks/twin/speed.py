"""The twin beside Dynamo's offline replay: the same trace, the same engine, how long, how much memory, what answers.

    python -m benchmarks.twin.speed               three rounds; kept in results/speed.{json,txt}; about three minutes

Run from the repository's root, on a machine that does nothing else. The trace is Mooncake's conversation trace from the
folder that KVOLT_TRACES names (`kvolt trace sources`), else the project's own small one, where start is all there is to
see. The peer is installed at the first run (`benchmarks/twin/peers/install`). Each run is a process on one core, all
with the same one; the two take turns. Wall time is that of the process, from start to end, reading the trace included;
`replay alone` is what Dynamo says of itself. Memory is the highest resident set.

Both simulate one engine (`replays`), so that their latencies can be held against each other. What is left between them:

- First tokens. Dynamo's pass in which a prompt is completed adds a decode pass, even if no other request decodes:
  a request of 100 tokens alone has its first token after 23.77 ms, 18.02 of prefill and 5.75 of decode. The twin's
  comes after the prefill, from whose last position engines sample it. Where others decode in the same step, as most
  of the time in this trace, a decode is in it anyway: ttft is 1.5 % lower in the mean, and equal in the median.
- Occupancy. Dynamo counts whole blocks in what a decode pass reads, the twin tokens: below 0.1 %.
- Network. The twin's requests cross one of 0.1 ms each way; Dynamo's replay has none.
- Percentiles. Those of the twin come from histograms with buckets of 0.4 %, Dynamo's from exact values (gaps: 0.1 %).
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from benchmarks.harness import (
    goal,
    in_turn,
    parser_for,
    peer_unless_smoke,
    report,
    run,
    say,
    spread,
    table,
)
from benchmarks.twin.replays import (
    KVOLT,
    LATENCIES,
    PEER,
    STATISTICS,
    Replayed,
    peer_python,
    replay_dynamo,
    replay_kvolt,
)

from kvolt.bench.traces import find_public, limit, read_trace, small_trace, write_trace

_TRACE = "mooncake-conversation"


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    num_workers: int
    num_requests: int | None
    """Of the trace; None for all."""


_FULL = Plan(3, 8, None)
_SMOKE = Plan(1, 8, 20)


def main() -> None:
    options = parser_for(__file__, __doc__, peer=PEER).parse_args()
    plan = _SMOKE if options.smoke else _FULL
    core = max(os.sched_getaffinity(0))
    python = peer_unless_smoke(options, peer_python)
    with tempfile.TemporaryDirectory(prefix="bench-twin-") as folder:
        name, trace, block_size = _trace(
            plan, Path(folder), None if options.smoke else os.environ.get("KVOLT_TRACES")
        )
        replays = _replays(plan, python, trace, block_size, core)
    report(options, text(name, replays), {"trace": name, "plan": plan, "replays": replays})


def _trace(plan: Plan, folder: Path, public: str | None) -> tuple[str, Path, int]:
    """Its name, a file that both read, and the block size of its hash ids."""
    paths = [each.path for each in find_public(public) if each.trace.name == _TRACE] if public else []
    if paths and paths[0] is not None:
        name, records = _TRACE, list(limit(read_trace(paths[0]), plan.num_requests or sys.maxsize))
    else:
        # Arrival times only: the two formats describe the turns of a session differently.
        few = limit(small_trace(), plan.num_requests or sys.maxsize)
        name, records = "small", [msgspec.structs.replace(each, session=None, delay=None) for each in few]
    path = folder / "trace.jsonl"
    write_trace(path, records)
    return f"{name}, {len(records)} requests", path, records[0].block_size


def _replays(plan: Plan, python: Path | None, trace: Path, block_size: int, core: int) -> list[Replayed]:
    rows: list[Replayed] = []
    for number in range(plan.rounds):
        turns: list[Callable[[], Replayed]] = [
            lambda: replay_kvolt(trace, plan.num_workers, core),
        ]
        if python is not None:
            turns.append(lambda: replay_dynamo(python, trace, plan.num_workers, block_size, core))
        for turn in in_turn(turns, number):
            row = turn()
            rows.append(row)
            say(f"round {number + 1}  {row.system:20} {row.used.wall_s:.2f} s")
    return rows


# --- the report

GOAL_WALL_S = 20.0
GOAL_RSS_BYTES = 1 << 30
GOAL_SAME = 0.05
_MIB = 1 << 20

_COSTS: tuple[tuple[str, Callable[[Replayed], float], str], ...] = (
    ("wall seconds", lambda row: row.used.wall_s, ".2f"),
    ("CPU seconds", lambda row: row.used.cpu_s, ".2f"),
    ("peak RSS MiB", lambda row: row.used.peak_rss_bytes / _MIB, ".0f"),
)


def text(trace: str, replays: Sequence[Replayed]) -> str:
    if not any(row.system == PEER for row in replays):
        return f"trace: {trace}\n\nmissing: {PEER}"
    return "\n\n".join([f"trace: {trace}", _costs(replays), _answers(replays)])


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
    same = goal(f"same latencies within {GOAL_SAME:.0%}", is_same, f"at most {largest:+.1%}")
    firsts = {KVOLT: ours.latencies, PEER: theirs.latencies}
    # Equal but for the order in which a sum was made.
    stays = all(
        math.isclose(value, firsts[row.system][name][statistic], rel_tol=1e-9)
        for row in replays
        for name, statistics in row.latencies.items()
        for statistic, value in statistics.items()
    )
    repeated = "equal in all rounds" if stays else "NOT equal in all rounds"
    return "\n".join([table(("", KVOLT, PEER, "difference"), body), same, f"latencies of each: {repeated}"])


if __name__ == "__main__":
    run(main)
