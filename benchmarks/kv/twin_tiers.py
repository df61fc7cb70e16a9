"""KV tiers in the twin: what they find of a trace, by size and rule, and what that does to the first token.

    KVOLT_TRACES=FOLDER python -m benchmarks.kv.twin_tiers     some minutes; results/twin_tiers.{json,txt}
    python -m benchmarks.kv.twin_tiers --quick                  the project's own small trace, not kept

The first requests of Mooncake's conversations on eight workers (mid-gpu-8b, `latency`), each with a device that holds
100,000 tokens and a host that holds so many times as much. Decided by the code of real workers, in virtual time: what
is kept, what goes, what is brought and what is computed again. `best`: of one cache as large as all devices and hosts
together, by Belady's rule on single blocks of the trace, which nobody can pass; 8 caches that requests are sent to one
by one are further from it than one would be. Nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from benchmarks.frontend.report import table
from benchmarks.router.gains_runs import mooncake
from benchmarks.runtime.report import keep_results, machine

from kvolt.bench.traces import limit, small_trace
from kvolt.bench.traces.tiers import best_hits
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.trace_block_tiers import TwinTiers

_RESULTS = Path(__file__).parent / "results" / "twin_tiers"
BLOCK = 16
NUM_REQUESTS = 4000
NUM_WORKERS = 8
TIMES = (0, 1, 4, 16)


class Row(msgspec.Struct, frozen=True):
    rule: str
    times: int
    """The host's size in devices."""
    share: float
    """Of input tokens, what was not computed."""
    brought: float
    """Of them, what came from the host."""
    best: float
    ttft_mean_ms: float
    ttft_p90_ms: float


def settings_of(rule: str, times: int, device_blocks: int) -> TwinSettings:
    return TwinSettings(
        num_workers=NUM_WORKERS,
        engine=SimArguments(kv_blocks=device_blocks, block_size=BLOCK),
        tiers=TwinTiers(host_blocks=times * device_blocks, eviction=rule),
    )


def run(records: Sequence[TraceRecord], rule: str, times: int, device_blocks: int) -> Row:
    settings = settings_of(rule, times, device_blocks)
    done = TwinRun(settings, new_tally(settings))
    done.run(records)
    tally = done.tally
    per_id = max(record.input_length / max(len(record.hash_ids), 1) for record in records[:100])
    capacity = max(int(NUM_WORKERS * (1 + times) * device_blocks * BLOCK / per_id), 1)
    num_asked, num_best = best_hits(records, capacity)
    ttft = tally.latencies["ttft"]
    return Row(
        rule if times else "none",
        times,
        tally.cached_tokens / tally.input_tokens,
        done.watch.brought_tokens.total() / tally.input_tokens,
        num_best / num_asked,
        1e3 * ttft.mean,
        1e3 * ttft.percentile(90),
    )


def text_of(rows: Sequence[Row]) -> str:
    body = [
        [
            row.rule,
            f"{row.times}x",
            f"{row.share:.1%}",
            f"{row.brought:.1%}",
            f"{row.best:.1%}",
            f"{row.share / row.best:.0%}",
            f"{row.ttft_mean_ms:,.0f}",
            f"{row.ttft_p90_ms:,.0f}",
        ]
        for row in rows
    ]
    names = ("rule", "host", "found", "of it brought", "best", "of best", "TTFT ms", "p90")
    return table(names, body)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the project's own small trace, not kept")
    args = parser.parse_args()
    public = None if args.quick else mooncake()
    records = list(small_trace() if public is None else limit(public, NUM_REQUESTS))
    device_blocks = 60 if public is None else 6250
    points = [(rule, times) for times in TIMES for rule in (EVICTIONS if times else ("lru",))]
    with ProcessPoolExecutor() as pool:
        done = [pool.submit(run, records, rule, times, device_blocks) for rule, times in points]
        rows = [each.result() for each in done]
    text = text_of(rows)
    print(text)
    if public is not None:
        results = {"requests": len(records), "device_blocks": device_blocks, "rows": rows}
        keep_results(_RESULTS, "benchmarks.kv.twin_tiers", machine(), text, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
