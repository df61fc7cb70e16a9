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

Growth: what a request costs with 256 workers over what it costs with 8, at the same load per worker (`scaling`). The
latencies of the two must be the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from benchmarks.harness import Missing, in_turn, parser_for, report, run, say
from benchmarks.twin import speed_report
from benchmarks.twin.replays import PEER, Replayed, on_one_core, peer_python, replay_dynamo, replay_kvolt
from benchmarks.twin.scaling import Scaled

from kvolt.bench.traces import find_public, limit, read_trace, small_trace, write_trace

_TRACE = "mooncake-conversation"


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    num_workers: int
    num_requests: int | None
    """Of the trace; None for all."""
    scaled_requests: int
    """On 8 workers; times the copies on the others."""
    copies: int


_FULL = Plan(3, 8, None, 376, 32)
_SMOKE = Plan(1, 8, 20, 10, 2)


def main() -> None:
    options = parser_for(__file__, __doc__, peer=PEER).parse_args()
    plan = _SMOKE if options.smoke else _FULL
    core = max(os.sched_getaffinity(0))
    try:
        python: Path | None = peer_python(options.peer_dir, may_install=not options.smoke)
    except Missing:
        if not options.smoke:
            raise
        python = None
    with tempfile.TemporaryDirectory(prefix="bench-twin-") as folder:
        name, trace, block_size = _trace(
            plan, Path(folder), None if options.smoke else os.environ.get("KVOLT_TRACES")
        )
        replays = _replays(plan, python, trace, block_size, core)
        scaled = _scaled(plan, trace, core)
    results = {"trace": name, "plan": plan, "replays": replays, "growth": scaled}
    report(options, speed_report.text(name, replays, scaled), results)


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


def _scaled(plan: Plan, trace: Path, core: int) -> list[Scaled]:
    rows: list[Scaled] = []
    for number in range(plan.rounds):
        for copies in (1, plan.copies):
            with tempfile.TemporaryDirectory(prefix="bench-twin-") as folder:
                numbers = (str(plan.scaled_requests), str(copies))
                command = [sys.executable, "-m", "benchmarks.twin.scaling", str(trace), *numbers]
                _, stdout = on_one_core("the twin", command, Path(folder), core)
            row = msgspec.json.decode(stdout, type=Scaled)
            rows.append(row)
            say(
                f"round {number + 1}  {row.num_workers:>3} workers  {row.cpu_us_per_request:.0f} us per request"
            )
    return rows


if __name__ == "__main__":
    run(main)
