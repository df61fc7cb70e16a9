"""One KV pool for four workers of a host, beside a private host tier of a quarter each: throughput and blocks kept.

    python -m benchmarks.kv.shared            some ten minutes on two cores; results/shared.{json,txt}

SmolLM2-135M on four workers whose devices hold two conversations each. Conversations, each with a long prefix of its
own, take turns, four at a time, in the same random order for every system. Routed by `round-robin`, which sends a
conversation to another worker each time, and by `latency`, which prefers the worker that has most of it. `private`:
each worker has a host tier of its own, a quarter of the pool of `shared`. `peers`: the same, and workers fetch blocks
from the worker that the router names (`latency` only). Requests per second and cached shares are of the rounds after
the first. Kept: blocks in all host tiers together."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from benchmarks.harness import Figure, parser_for, report, row_table, run, say
from benchmarks.kv.returning import tokens
from benchmarks.processes import KVOLT, Processes, System, complete, served_by, small_model

BLOCK = 16
NUM_WORKERS = 4
CONCURRENCY = 4
FLAGS: dict[str, tuple[str, ...]] = {"private": (), "peers": ("--kv-peers",), "shared": ("--kv-shared",)}
RUNS = (
    ("round-robin", "private"),
    ("round-robin", "shared"),
    ("latency", "private"),
    ("latency", "peers"),
    ("latency", "shared"),
)


class Plan(msgspec.Struct, frozen=True):
    sessions: int = 12
    prefix_tokens: int = 480
    turn_tokens: int = 16
    rounds: int = 4
    device_blocks: int = 64
    num_workers: int = NUM_WORKERS
    runs: tuple[tuple[str, str], ...] = RUNS

    @property
    def session_blocks(self) -> int:
        return self.prefix_tokens // BLOCK

    @property
    def pool_blocks(self) -> int:
        """Blocks of all host tiers together: all conversations, and a third more for the ends of turns."""
        return self.sessions * self.session_blocks * 4 // 3


SMOKE = Plan(3, 160, 16, 2, 32, 1, RUNS[4:])


class Row(msgspec.Struct, frozen=True):
    router: str
    pool: str
    requests_per_s: float
    cached_share: float
    ttft_ms: float
    num_kept: int
    """Blocks in the host tiers of the workers or in the pool."""
    is_same: bool
    """Whether every text equals that of the first run."""


def num_kept(processes: Processes, pool: str) -> int:
    def kvolt(*arguments: str) -> object:
        done = subprocess.run(
            [*KVOLT, *arguments, "--json"],
            env=processes.environ(),
            capture_output=True,
            check=True,
            timeout=60,
        )
        return json.loads(done.stdout)

    if pool == "shared":
        stat = kvolt("cache", "stat", "--pool", str(processes.folder / "logs" / "kv-pool-0.sock"))
        assert isinstance(stat, dict)
        return sum(count for tier, count, *_ in stat["tiers"] if tier == "host")
    views = kvolt("status")
    assert isinstance(views, list)
    count = 0.0
    for view in views:
        if view.get("admin"):
            with urllib.request.urlopen(f"http://{view['admin']}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            count += sum(
                float(line.split()[-1]) for line in lines if line.startswith('kvolt_tier_blocks{tier="host"}')
            )
    return int(count)


def solve(plan: Plan, model: str, router: str, pool: str, expected: list[str]) -> Row:
    draw = random.Random(5)
    sessions = [tokens(draw, plan.prefix_tokens) for _ in range(plan.sessions)]
    rounds = []
    for _ in range(plan.rounds):
        order = draw.sample(sessions, len(sessions))
        rounds.append([[*session, *tokens(draw, plan.turn_tokens)] for session in order])
    host = plan.pool_blocks if pool == "shared" else plan.pool_blocks // plan.num_workers
    system = System(
        model=model,
        workers=plan.num_workers,
        arguments={
            "served_name": "m",
            "kv_blocks": plan.device_blocks,
            "threads": 1,
            "dtype": "float32",
            # Four workers that measure their steps at once on two cores would differ by chance.
            "measure_steps": "false",
        },
    )
    flags = ("--router", router, "--kv-host", f"{host}blocks", *FLAGS[pool])
    with (
        Processes("shared") as processes,
        served_by(processes, system, flags) as url,
        ThreadPoolExecutor(CONCURRENCY) as threads,
    ):
        answers, took_s = [], 0.0
        for number, prompts in enumerate(rounds):
            started = time.perf_counter()
            answers.append(list(threads.map(lambda prompt: complete(url, prompt, 4), prompts)))
            if number:
                took_s += time.perf_counter() - started
            time.sleep(0.5)
        kept = num_kept(processes, pool)
    texts = [each.text for answered in answers for each in answered]
    expected += [] if expected else texts
    later = [each for answered in answers[1:] for each in answered]
    row = Row(
        router,
        pool,
        len(later) / took_s,
        sum(each.cached_tokens for each in later) / (len(later) * plan.prefix_tokens),
        1e3 * sum(each.ttft_s for each in later) / len(later),
        kept,
        texts == expected,
    )
    say(str(row))
    return row


FIGURES = (
    Figure("router", "router", ""),
    Figure("pools", "pool", ""),
    Figure("requests/s", "requests_per_s", ".2f"),
    Figure("cached", "cached_share", ".0%"),
    Figure("TTFT ms", "ttft_ms", ",.0f"),
    Figure("blocks kept", "num_kept", ","),
    Figure("same text", lambda row: "yes" if row.is_same else "NO", ""),
)


def text_of(plan: Plan, rows: Sequence[Row]) -> str:
    lines = [
        f"{plan.sessions} conversations of {plan.session_blocks} blocks, {plan.pool_blocks} blocks of memory in all",
        row_table(FIGURES, rows),
    ]
    private = {row.router: row for row in rows if row.pool == "private"}
    for row in rows:
        beside = private.get(row.router)
        if beside is not None and beside is not row:
            rate, ttft = row.requests_per_s / beside.requests_per_s, row.ttft_ms / beside.ttft_ms
            lines.append(f"{row.router}: {row.pool} over private, requests/s {rate:.2f}, TTFT {ttft:.2f}")
    return "\n".join(lines)


def main() -> int:
    options = parser_for(__file__, __doc__).parse_args()
    plan, expected = SMOKE if options.smoke else Plan(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), options.smoke)
        rows = [solve(plan, model, router, pool, expected) for router, pool in plan.runs]
    report(options, text_of(plan, rows), {"plan": plan, "rows": rows})
    return 0 if all(row.is_same for row in rows) else 1


if __name__ == "__main__":
    run(main)
