"""One pool for four workers of a host, beside a memory of a quarter for each: what is kept, found and answered.

    python -m benchmarks.kv.shared            some ten minutes on two cores; results/shared.{json,txt}
    python -m benchmarks.kv.shared --quick    one round of few conversations, not kept

SmolLM2-135M on four workers whose devices hold two conversations each. Conversations, each with a long beginning of its
own, are asked in turns, four at a time, in a random order that is the same for all. Routed by `round-robin`, where a
conversation comes to another worker each time, and by `latency`, which sends it to who has most of it. `private`: each
worker keeps blocks in a memory of its own, a quarter of what `shared` has in one pool. `peers`: the same, and workers
fetch from each other what the router (`latency` only) says that another has. Requests per second and cached
shares are of the rounds after the first. Kept: blocks in all tiers of the host together.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from benchmarks.frontend.report import table
from benchmarks.frontend.system import Processes, clean_environ, free_port
from benchmarks.kv.returning import ask, tokens
from benchmarks.runtime.pair import BrokenRun
from benchmarks.runtime.report import keep_results, machine
from benchmarks.twin.accuracy_runs import num_served

_RESULTS = Path(__file__).parent / "results" / "shared"
BLOCK = 16
NUM_WORKERS = 4
AT_ONCE = 4
_READY_S = 240.0
FLAGS: dict[str, tuple[str, ...]] = {"private": (), "peers": ("--kv-peers",), "shared": ("--kv-shared",)}


class Plan(msgspec.Struct, frozen=True):
    sessions: int = 12
    prefix_tokens: int = 480
    turn_tokens: int = 16
    rounds: int = 4
    device_blocks: int = 64

    @property
    def session_blocks(self) -> int:
        return self.prefix_tokens // BLOCK

    @property
    def pool_blocks(self) -> int:
        """Of all memories together: all conversations, and a third more for the ends of turns."""
        return self.sessions * self.session_blocks * 4 // 3


class Row(msgspec.Struct, frozen=True):
    router: str
    pool: str
    requests_per_s: float
    cached_share: float
    ttft_ms: float
    num_kept: int
    """Blocks in memories of the host that workers or the pool keep."""
    is_same: bool
    """Whether every text is that of the first run."""


class Served:
    def __init__(self, folder: Path, environ: dict[str, str], url: str) -> None:
        self._folder, self._environ, self.url = folder, environ, url

    def _kvolt(self, *arguments: str) -> object:
        command = [sys.executable, "-m", "kvolt", *arguments]
        done = subprocess.run(
            command, env=self._environ, capture_output=True, check=True, text=True, timeout=60
        )
        return json.loads(done.stdout)

    def num_kept(self, pool: str) -> int:
        if pool == "shared":
            told = self._kvolt(
                "cache", "stat", "--pool", str(self._folder / "logs" / "kv-pool-0.sock"), "--json"
            )
            assert isinstance(told, dict)
            return sum(count for tier, count, _ in told["tiers"] if tier == "host")
        views = self._kvolt("status", "--json")
        assert isinstance(views, list)
        count = 0.0
        for view in views:
            if view.get("admin"):
                with urllib.request.urlopen(f"http://{view['admin']}/metrics", timeout=10) as answer:
                    lines = answer.read().decode().splitlines()
                count += sum(
                    float(line.split()[-1])
                    for line in lines
                    if line.startswith('kvolt_tier_blocks{tier="host"}')
                )
        return int(count)


@contextmanager
def served(plan: Plan, router: str, pool: str) -> Iterator[Served]:
    host = plan.pool_blocks if pool == "shared" else plan.pool_blocks // NUM_WORKERS
    with Processes("shared") as processes:
        port = free_port()
        environ = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"),
            KVOLT_SUPERVISOR_LOG_DIR=str(processes.folder / "logs"),
            KVOLT_LOG_LEVEL="warning",
        )
        command = [sys.executable, "-m", "kvolt", "serve", "smollm2-135m", "--port", str(port)]
        command += ["--aggregated", str(NUM_WORKERS), "--router", router, "--kv-host", f"{host}blocks"]
        for name, value in (("served_name", "m"), ("kv_blocks", plan.device_blocks), ("threads", 1)):
            command += ["--arg", f"{name}={value}"]
        # Four that measure their steps at once on two cores find anything: some would be held to be faster by chance.
        command += ["--arg", "dtype=float32", "--arg", "measure_steps=false", *FLAGS[pool]]
        serving = processes.start("serve", command, environ)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
        while num_served(url) < NUM_WORKERS:
            if serving.poll() is not None or time.monotonic() > deadline:
                said = (processes.folder / "serve.log").read_text(errors="replace")[-2000:]
                raise BrokenRun(f"kvolt serve is not ready:\n{said}")
            time.sleep(0.2)
        yield Served(processes.folder, environ, url)


def run(plan: Plan, router: str, pool: str, expected: list[str]) -> Row:
    draw = random.Random(5)
    sessions = [tokens(draw, plan.prefix_tokens) for _ in range(plan.sessions)]
    rounds = []
    for _ in range(plan.rounds):
        order = draw.sample(sessions, len(sessions))
        rounds.append([[*session, *tokens(draw, plan.turn_tokens)] for session in order])
    with served(plan, router, pool) as system, ThreadPoolExecutor(AT_ONCE) as threads:
        answers, took_s = [], 0.0
        for number, prompts in enumerate(rounds):
            began = time.perf_counter()
            asked = list(threads.map(lambda prompt: ask(system.url, prompt, 4), prompts))
            if number:
                took_s += time.perf_counter() - began
            answers.append(asked)
            time.sleep(0.5)
        kept = system.num_kept(pool)
    texts = [each.text for asked in answers for each in asked]
    expected += [] if expected else texts
    later = [each for asked in answers[1:] for each in asked]
    row = Row(
        router,
        pool,
        len(later) / took_s,
        sum(each.cached for each in later) / (len(later) * plan.prefix_tokens),
        1e3 * sum(each.ttft_s for each in later) / len(later),
        kept,
        texts == expected,
    )
    print(row, file=sys.stderr, flush=True)
    return row


def text_of(plan: Plan, rows: Sequence[Row]) -> str:
    body = [
        [
            row.router,
            row.pool,
            f"{row.requests_per_s:.2f}",
            f"{row.cached_share:.0%}",
            f"{row.ttft_ms:,.0f}",
            f"{row.num_kept:,}",
            "yes" if row.is_same else "NO",
        ]
        for row in rows
    ]
    lines = [
        f"{plan.sessions} conversations of {plan.session_blocks} blocks, {plan.pool_blocks} blocks of memory in all",
        table(("router", "pools", "requests/s", "cached", "TTFT ms", "blocks kept", "same text"), body),
    ]
    private = {row.router: row for row in rows if row.pool == "private"}
    for row in rows:
        if row.pool != "private":
            beside = private[row.router]
            rate, ttft = row.requests_per_s / beside.requests_per_s, row.ttft_ms / beside.ttft_ms
            lines.append(f"{row.router}: {row.pool} over private, requests/s {rate:.2f}, TTFT {ttft:.2f}")
    return "\n".join(lines)


RUNS = (
    ("round-robin", "private"),
    ("round-robin", "shared"),
    ("latency", "private"),
    ("latency", "peers"),
    ("latency", "shared"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few conversations, not kept")
    args = parser.parse_args()
    plan = Plan(sessions=3, prefix_tokens=160, rounds=2, device_blocks=32) if args.quick else Plan()
    found = machine()
    expected: list[str] = []
    runs = [each for each in RUNS if not args.quick or each[0] == "latency"]
    rows = [run(plan, router, pool, expected) for router, pool in runs]
    text = text_of(plan, rows)
    print(text)
    if not args.quick:
        results = {"plan": plan, "rows": rows}
        keep_results(_RESULTS, "benchmarks.kv.shared", found, text, results)
    return 0 if all(row.is_same for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
