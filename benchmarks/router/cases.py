"""Routers in the twin where requests or workers are uneven: the part `cases` of `benchmarks.router.gains`.

Cluster: 8 workers, blocks of 64 tokens, 16,384 each. Requests come at random (Poisson) for 20 s, the first 6 of which
are not measured; every prompt is a prefix and 64 to 512 tokens of its own, every answer 64 to 192 tokens.

    shared prefix 4k     all begin with the same 4,032 tokens, 40 requests/s, `h200-llama-8b`
    shared prefix 16k    all begin with the same 16,000 tokens, 40 requests/s, `h200-llama-8b`
    shared 16k, mocker   the same at 60 requests/s, `dynamo-mocker`
    hot tenant           half of the requests begin with one prefix of 4,032 tokens, the others with one of 20
    slow worker          as hot tenant, 24 requests/s; one worker takes three times as long as it says
    failing worker       as hot tenant, 24 requests/s; one worker fails whatever it gets

Times are virtual. Failed requests are counted and not in the times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from benchmarks.harness import Rows, goal, table
from benchmarks.router.gains_runs import (
    BLOCK_SIZE,
    CLASSIC,
    HITS,
    LATENCIES,
    LATENCY,
    NUM_BLOCKS,
    NUM_WORKERS,
    ROUND_ROBIN,
    Figures,
    figures_of,
)
from benchmarks.studies import samples_of

from kvolt.core.trace import TraceRecord
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.faults import Faults

ROUTERS = (LATENCY, CLASSIC, ROUND_ROBIN)
GOAL = 1.02
"""Tolerance relative to the best other policy; a difference within it counts as equal."""


class Case(msgspec.Struct, frozen=True):
    name: str
    prefix_tokens: int
    rate_per_s: float
    preset: str = "h200-llama-8b"
    num_tenants: int = 1
    hot_share: float = 1.0
    """Share of requests of the first tenant."""
    faults: Faults = Faults()


CASES = (
    Case("shared prefix 4k", 4032, 40.0),
    Case("shared prefix 16k", 16_000, 40.0),
    Case("shared 16k, mocker", 16_000, 60.0, "dynamo-mocker"),
    Case("hot tenant", 4032, 40.0, num_tenants=21, hot_share=0.5),
    Case("slow worker", 4032, 24.0, num_tenants=21, hot_share=0.5, faults=Faults(slow_workers=1)),
    Case("failing worker", 4032, 24.0, num_tenants=21, hot_share=0.5, faults=Faults(failing_workers=1)),
)


class CasePoint(msgspec.Struct, frozen=True):
    """Everything that determines one run."""

    case: Case
    router: str
    seed: int
    seconds: float
    warm_s: float
    """Requests that arrive before this time are not measured."""


class CaseRow(msgspec.Struct, frozen=True):
    point: CasePoint
    figures: Figures


def records_of(case: Case, seed: int, seconds: float) -> list[TraceRecord]:
    rng = random.Random(f"{seed}/{case.name}")
    records: list[TraceRecord] = []
    at_s, next_id = rng.expovariate(case.rate_per_s), 10_000_000
    while at_s < seconds:
        is_hot = case.num_tenants == 1 or rng.random() < case.hot_share
        tenant = 0 if is_hot else rng.randrange(1, case.num_tenants)
        num_own = rng.randint(64, 512)
        num_own_blocks = -(-num_own // BLOCK_SIZE)
        prefix = range(tenant * 100_000, tenant * 100_000 + case.prefix_tokens // BLOCK_SIZE)
        records.append(
            TraceRecord(
                timestamp=1e3 * at_s,
                input_length=case.prefix_tokens + num_own,
                output_length=rng.randint(64, 192),
                hash_ids=(*prefix, *range(next_id, next_id + num_own_blocks)),
                block_size=BLOCK_SIZE,
            )
        )
        next_id += num_own_blocks
        at_s += rng.expovariate(case.rate_per_s)
    return records


def solve_case(point: CasePoint) -> CaseRow:
    case = point.case
    settings = TwinSettings(
        num_workers=NUM_WORKERS,
        router=point.router,
        engine=SimArguments(
            preset=case.preset, block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS, context_length=65_536
        ),
        seed=point.seed,
        faults=case.faults,
    )
    samples = samples_of(settings, records_of(case, point.seed, point.seconds))
    return CaseRow(point, figures_of([each for each in samples if each.due_s >= point.warm_s]))


def text(rows: Sequence[CaseRow]) -> str:
    body, goals = [], []
    for case, of_case in Rows(rows, by="point.seed").each("point.case.name"):
        routers = dict(of_case.each("point.router"))
        for router, mine in routers.items():
            failed = sum(row.figures.num_failed for row in mine.rows)
            body.append((case, router, *mine.cells((*LATENCIES, HITS)), str(failed)))
        ratios = {
            each.title: routers[LATENCY].fold(each).mean
            / min(routers[router].fold(each).mean for router in ROUTERS if router != LATENCY)
            for each in LATENCIES
        }
        shown = ", ".join(f"{name.removesuffix(' ms')} {ratio:.2f}" for name, ratio in ratios.items())
        is_met = all(ratio <= GOAL for name, ratio in ratios.items() if not name.startswith("ITL"))
        goals.append(goal(f"{case}: {LATENCY} as good as the better of the others", is_met, shown))
    head = ("case", "router", *(each.title for each in (*LATENCIES, HITS)), "failed")
    return "\n".join([table(head, body), *goals])
