"""Late binding and withdrawal during a step in load, in the twin: TTFT of the requests that arrive with the step.

    python -m benchmarks.router.step_load            some ten minutes; results/step_load.{json,txt}

Cluster: 8 workers (`mid-gpu-8b`, 64 sequences each). Load: a third of the capacity, then slightly more than the
capacity for fifteen seconds, then a third again; prompts and answers of very different lengths. Half of the prompts
start with one of sixteen shared prefixes. Results are those of requests that arrived during the step or within ten
seconds after it. Times are virtual, independent of the load of the machine.

In the first cluster every worker is as fast as it reports, so that the router predicts first tokens well. In `one slow`
one worker takes three times as long as it reports.

Rows, each over the same seeds; `p99 beside` is the mean of the ratios to `at once`, seed by seed:

    at once              requests are sent on arrival, whatever the load, and stay at their worker
    taken back           the same, but a request that has not started moves if another worker is much earlier
    late                 requests wait in the router while all workers are busy
    late and taken back  both: the default of `latency` and `classic`
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean

import msgspec
import numpy as np
from benchmarks.harness import Figure, Rows, parser_for, report, run, say, table

from kvolt.bench.load.sample import Sample
from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.faults import Faults
from kvolt.twin.replay import TwinRun, new_tally

NUM_WORKERS, NUM_SEQS, BLOCK_SIZE = 8, 64, 16
_NEVER = 1e6
"""Saturation limit in multiples of a worker's batch: never reached."""

WAYS = {
    "at once": RouterSettings(queue=False, saturated_seqs=_NEVER, saturated_batches=_NEVER),
    "taken back": RouterSettings(saturated_seqs=_NEVER, saturated_batches=_NEVER),
    "late": RouterSettings(withdraw_max_moves=0),
    "late and taken back": RouterSettings(),
}


CLUSTERS = {"as told": Faults(), "one slow": Faults(slow_workers=1)}  # words: ok, labels of results


class Jump(msgspec.Struct, frozen=True):
    base_per_s: float = 18.0
    peak_per_s: float = 55.0
    from_s: float = 5.0
    to_s: float = 20.0
    end_s: float = 30.0

    def rate(self, at_s: float) -> float:
        return self.peak_per_s if self.from_s <= at_s < self.to_s else self.base_per_s


class Figures(msgspec.Struct, frozen=True):
    """Results of the requests that arrived with the step, in milliseconds."""

    num_requests: int
    num_failed: int
    num_moves: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_max_ms: float


class Row(msgspec.Struct, frozen=True):
    cluster: str
    router: str
    way: str
    seed: int
    figures: Figures


def records(jump: Jump, seed: int) -> Iterator[TraceRecord]:
    rng = random.Random(f"{seed}/jump")
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(jump.rate(at_s))) < jump.end_s:
        number += 1
        length = int(min(max(rng.lognormvariate(7.2, 1.0), 64), 24_000))
        num_blocks = -(-length // BLOCK_SIZE)
        beginning = rng.randrange(16) if rng.random() < 0.5 else None
        shared = min(num_blocks // 2, 64) if beginning is not None else 0
        hash_ids = [1_000_000 * (beginning or 0) + block for block in range(shared)]
        hash_ids += [100_000_000 + 10_000 * number + block for block in range(num_blocks - shared)]
        yield TraceRecord(
            timestamp=1e3 * at_s,
            input_length=length,
            output_length=int(min(max(rng.lognormvariate(5.0, 1.0), 4), 2000)),
            hash_ids=tuple(hash_ids),
            block_size=BLOCK_SIZE,
        )


def solve(cluster: str, router: str, way: str, jump: Jump, seed: int) -> Row:
    settings = TwinSettings(
        num_workers=NUM_WORKERS,
        router=router,
        routing=WAYS[way],
        engine=SimArguments(preset="mid-gpu-8b", max_num_seqs=NUM_SEQS, block_size=BLOCK_SIZE),
        seed=seed,
        faults=CLUSTERS[cluster],
    )
    run = TwinRun(settings, new_tally(settings))
    samples: list[Sample] = []
    num_moves = 0

    def on_sample(sample: Sample) -> None:
        nonlocal num_moves
        samples.append(sample)
        if run.cluster is not None:
            num_moves = run.cluster.journey_context.stats.num_moves

    run.run(records(jump, seed), on_sample)
    hit = [each for each in samples if jump.from_s <= each.due_s < jump.to_s + 10.0]
    waits_ms = [1e3 * (each.first_s - each.due_s) for each in hit if each.first_s is not None]
    return Row(
        cluster,
        router,
        way,
        seed,
        Figures(
            num_requests=len(hit),
            num_failed=sum(each.error is not None for each in hit),
            num_moves=num_moves,
            ttft_mean_ms=float(np.mean(waits_ms)),
            ttft_p50_ms=float(np.percentile(waits_ms, 50)),
            ttft_p99_ms=float(np.percentile(waits_ms, 99)),
            ttft_max_ms=float(max(waits_ms)),
        ),
    )


FIGURES = (
    *(
        Figure(f"TTFT {name} ms", f"figures.ttft_{name}_ms", ",.0f", fmean)
        for name in ("mean", "p50", "p99", "max")
    ),
    Figure("moved", "figures.num_moves", ",.0f", fmean),
    Figure("failed", "figures.num_failed", ",.0f", fmean),
)
P99 = Figure("p99", "figures.ttft_p99_ms")


def text(rows: Sequence[Row]) -> str:
    body = []
    for place, mine in Rows(rows, by="seed").each("cluster", "router"):
        base = mine.where(way="at once").values(P99)
        for way, each in mine.each("way"):
            ratio = fmean(value / base[seed] for seed, value in each.values(P99).items())
            body.append((*place, way, *each.cells(FIGURES), f"{ratio:.2f}x"))
    return table(("cluster", "router", "way", *(each.title for each in FIGURES), "p99 beside"), body)


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    jump, points = Jump(), list(product(CLUSTERS, ("latency", "classic"), WAYS, range(5)))
    if options.smoke:
        jump, points = (
            Jump(from_s=1.0, to_s=2.0, end_s=3.0),
            [("one slow", "latency", way, 0) for way in WAYS],
        )
    rows = []
    for cluster, router, way, seed in points:
        rows.append(row := solve(cluster, router, way, jump, seed))
        say(f"{cluster}, {router}, {way}, seed {seed}: p99 {row.figures.ttft_p99_ms:,.0f} ms")
    report(options, text(rows), {"jump": jump, "rows": rows})


if __name__ == "__main__":
    run(main)
