"""KV tiers in the twin: cache hits of a trace by host size and eviction policy, and their effect on TTFT.

    KVOLT_TRACES=FOLDER python -m benchmarks.kv.twin_tiers     some minutes; results/twin_tiers.{json,txt}

The first requests of Mooncake's conversations (without KVOLT_TRACES: kvolt's own small trace) on eight workers
(mid-gpu-8b, `latency`), each with a device that holds 100,000 tokens and a host that holds a multiple of it. The code
of real workers decides, in virtual time, what is kept, evicted, onboarded and computed. `best`: one cache as large as
all devices and hosts together under Belady's rule on single blocks of the trace, an upper bound. Results do not depend
on the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec
from benchmarks.harness import Figure, in_processes, parser_for, report, row_table, run
from benchmarks.router.gains_runs import mooncake

from kvolt.bench.traces import limit, small_trace
from kvolt.bench.traces.tiers import best_hits
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.trace_block_tiers import TwinTiers

BLOCK = 16
NUM_REQUESTS = 4000
NUM_WORKERS = 8
TIMES = (0, 1, 4, 16)


class Row(msgspec.Struct, frozen=True):
    rule: str
    times: int
    """Size of the host, in devices."""
    share: float
    """Cached share of the input tokens."""
    onboarded: float
    """Share of hit tokens that was onboarded from the host."""
    best: float
    ttft_mean_ms: float
    ttft_p90_ms: float


def solve(records: Sequence[TraceRecord], device_blocks: int, point: tuple[str, int]) -> Row:
    rule, times = point
    settings = TwinSettings(
        num_workers=NUM_WORKERS,
        engine=SimArguments(kv_blocks=device_blocks, block_size=BLOCK),
        tiers=TwinTiers(host_blocks=times * device_blocks, eviction=rule),
    )
    done = TwinRun(settings, new_tally(settings))
    done.run(records)
    tally = done.tally
    per_id = max(record.input_length / max(len(record.hash_ids), 1) for record in records[:100])
    capacity = max(int(NUM_WORKERS * (1 + times) * device_blocks * BLOCK / per_id), 1)
    num_requested, num_best = best_hits(records, capacity)
    ttft = tally.latencies["ttft"]
    return Row(
        rule if times else "none",
        times,
        tally.cached_tokens / tally.input_tokens,
        done.watch.onboarded_tokens.total() / tally.input_tokens,
        num_best / num_requested,
        1e3 * ttft.mean,
        1e3 * ttft.percentile(90),
    )


FIGURES = (
    Figure("rule", "rule", ""),
    Figure("host", lambda row: f"{row.times}x", ""),
    Figure("cached", "share", ".1%"),
    Figure("onboarded", "onboarded", ".1%"),
    Figure("best", "best", ".1%"),
    Figure("of best", lambda row: row.share / row.best, ".0%"),
    Figure("TTFT ms", "ttft_mean_ms", ",.0f"),
    Figure("p90", "ttft_p90_ms", ",.0f"),
)


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    public = None if options.smoke else mooncake()
    if public is None:
        records, device_blocks = list(limit(small_trace(), 200) if options.smoke else small_trace()), 60
    else:
        records, device_blocks = list(limit(public, NUM_REQUESTS)), 6250
    points = [(rule, times) for times in TIMES for rule in (EVICTIONS if times else ("lru",))]
    if options.smoke:
        rows = [solve(records, device_blocks, point) for point in points[:2]]
    else:
        work = partial(solve, records, device_blocks)
        rows = sorted(in_processes(work, points, os.cpu_count() or 1), key=lambda row: (row.times, row.rule))
    results = {"requests": len(records), "device_blocks": device_blocks, "rows": rows}
    report(options, row_table(FIGURES, rows), results)


if __name__ == "__main__":
    run(main)
