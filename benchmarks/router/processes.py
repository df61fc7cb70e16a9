"""Round-robin beside KV routing with real processes in real time: TTFT and hit rate of chats of several turns.

    python -m benchmarks.router.processes                      fifteen minutes; kept in results/processes.{json,txt}
    python -m benchmarks.router.processes --engines sim        only the sim engine, five minutes

Run from the repository's root, on a machine that does nothing else. `kvolt serve` with several workers, `kvolt bench`
with conversations whose every turn sends all that was said before; in every round each router has a server of its own
with empty caches, the same conversations at the same times, and who comes first changes. The sim engine takes the time
of an 8B model on a mid-size GPU (its default preset) and next to no CPU; the native engine computes SmolLM2-135M, each
worker with one thread. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec
from benchmarks.harness import BrokenRun, goal, in_turn, names, parser_for, run, say, spread, table
from benchmarks.harness import report as write_report
from benchmarks.processes import System, output_of, served

from kvolt.bench.load.report import decode_report

ROUND_ROBIN, LATENCY = "round-robin", "latency"
_BENCH_S = 600.0
_WARM_UP = ("--rate", "4", "--requests", "8", "--input", "40", "--output", "4", "--seed", "90")
GOAL_GAIN = 1.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """An engine and the chats that it is asked."""

    system: System
    conversations_per_s: float
    requests: int
    warm_up: int
    """Of these, in no figure."""
    turns: int
    question: int
    """Tokens; so is the next."""
    answer: int
    shared_prefix: int
    prefixes: int
    think_s: float = 1.0


CASES = {
    "sim": Case(
        system=System(
            model="sim-tiny",
            workers=4,
            arguments={"context_length": 32_768, "kv_blocks": 16_384},
        ),
        conversations_per_s=1.5,
        requests=320,
        warm_up=40,
        turns=6,
        question=768,
        answer=32,
        shared_prefix=2048,
        prefixes=8,
    ),
    "native": Case(
        system=System(model="smollm2-135m", workers=2, arguments={"device": "cpu", "threads": 1}),
        conversations_per_s=0.2,
        requests=80,
        warm_up=12,
        turns=5,
        question=64,
        answer=12,
        shared_prefix=192,
        prefixes=4,
    ),
}
_SMOKE = msgspec.structs.replace(
    CASES["sim"],
    system=System(model="sim-tiny", workers=2, arguments={"context_length": 8192, "speed": 10}),
    conversations_per_s=8.0,
    requests=12,
    warm_up=2,
    turns=2,
    shared_prefix=256,
    think_s=0.1,
)


class Row(msgspec.Struct, frozen=True):
    """One router on one engine in one round; without figures the reason."""

    round: int
    engine: str
    router: str
    ttft_mean_ms: float = 0.0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    hit_rate: float = 0.0
    requests_per_s: float = 0.0
    num_whole: int = 0
    num_failed: int = 0
    error: str = ""


def main() -> None:
    options = _options()
    cases = {"sim": _SMOKE} if options.smoke else {name: CASES[name] for name in options.engines}
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        for engine, case in cases.items():
            routers = (LATENCY,) if options.smoke else (ROUND_ROBIN, LATENCY)
            for router in in_turn(routers, number):
                rows.append(_row(number, engine, router, case))
                _tell(rows[-1])
    write_report(options, report(rows), {"cases": cases, "rows": rows})
    if options.smoke and any(row.error for row in rows):
        raise BrokenRun(rows[0].error)


def _row(number: int, engine: str, router: str, case: Case) -> Row:
    try:
        with served(case.system, ("--router", router)) as url:
            output_of(["kvolt", "bench", "--url", url, "--quiet", *_WARM_UP], _BENCH_S)
            said = output_of(_bench_command(url, case, number), _BENCH_S)
    except BrokenRun as error:
        return Row(number, engine, router, error=str(error))
    told = decode_report(said, "the report of kvolt bench")
    ttft, counts = told.latencies["ttft"], told.counts
    return Row(
        number,
        engine,
        router,
        1e3 * ttft.mean,
        1e3 * ttft.p50,
        1e3 * ttft.p99,
        (counts.cached_tokens or 0) / max(counts.input_tokens, 1),
        told.throughput.requests_per_s,
        counts.complete,
        counts.failed,
    )


def _bench_command(url: str, case: Case, seed: int) -> list[str]:
    """As a user would type it."""
    return [
        *("kvolt", "bench", "--url", url, "--json", "--quiet", "--set", "temperature=0", "--seed", str(seed)),
        *("--rate", f"{case.conversations_per_s:g}", "--turns", str(case.turns)),
        *("--think", f"{case.think_s:g}s", "--input", str(case.question + case.shared_prefix)),
        *("--shared-prefix", str(case.shared_prefix), "--prefixes", str(case.prefixes)),
        *("--output", str(case.answer), "--requests", str(case.requests), "--warmup", str(case.warm_up)),
    ]


def report(rows: Sequence[Row]) -> str:
    body, goals = [], []
    for engine in dict.fromkeys(row.engine for row in rows):
        mine = [row for row in rows if row.engine == engine and not row.error]
        by_round = {
            router: {row.round: row for row in mine if row.router == router}
            for router in (ROUND_ROBIN, LATENCY)
        }
        for router, done in by_round.items():
            if not done:
                continue
            values = [
                [getattr(row, name) for row in done.values()]
                for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "requests_per_s")
            ]
            hits = spread([100 * row.hit_rate for row in done.values()]).text(".1f")
            whole = f"{sum(row.num_whole for row in done.values())}"
            failed = str(sum(row.num_failed for row in done.values()))
            *times, rates = (spread(each) for each in values)
            body.append(
                (
                    engine,
                    router,
                    *(each.text(".0f") for each in times),
                    rates.text(".2f"),
                    hits,
                    whole,
                    failed,
                )
            )
        both = [number for number in by_round[ROUND_ROBIN] if number in by_round[LATENCY]]
        for name, label in (("ttft_mean_ms", "mean"), ("ttft_p99_ms", "p99")):
            gains = [
                getattr(by_round[ROUND_ROBIN][number], name) / getattr(by_round[LATENCY][number], name)
                for number in both
            ]
            if gains:
                gain = spread(gains)
                title = f"{engine}: less TTFT ({label}) than with round-robin"
                goals.append(goal(title, gain.median > GOAL_GAIN, f"{gain.text()} times less"))
    goals += [f"missing: {row.engine} with {row.router}: {row.error}" for row in rows if row.error]
    head = (
        "engine | router | TTFT mean ms | TTFT p50 ms | "
        "TTFT p99 ms | requests/s | hit rate % | answers | failed"
    )
    return "\n".join([table(head, body), *goals])


def _tell(row: Row) -> None:
    told = row.error or f"TTFT {row.ttft_mean_ms:.0f} ms, {100 * row.hit_rate:.0f} % found"
    say(f"round {row.round}: {row.engine}, {row.router}: {told}")


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="rounds of both routers (default: %(default)s)")
    add("--engines", type=names, default=tuple(CASES), help=f"of {', '.join(CASES)} (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.engines if name not in CASES]:
        parser.error(f"unknown engines {unknown}; known: {', '.join(CASES)}")
    if options.smoke:
        options.rounds = 1
    return options


if __name__ == "__main__":
    run(main)
