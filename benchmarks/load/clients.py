"""CPU cost per token of `kvolt bench` compared to aiperf, and many streams from one core.

    python -m benchmarks.load.clients             all parts, about six minutes; results/clients.{json,txt}

Cost: CPU is user and system time of all processes of a client. Cost per token: CPU from the first request on in a run
with long answers, minus that of a run with as many requests for a single token, over the difference in tokens; it
excludes start and requests. Cost of the whole run: all CPU over all tokens. The server (`canned`) has its answers
ready:

- *flat out*: an answer arrives as fast as it is read, many tokens per read: the client's work per token.
- *paced*: each token arrives in a write of its own, at 10,000 a second over all streams. Most CPU of a lean client is
  then wakeups and reads.

Both clients run under each load in each round, in alternating order; a ratio is of one round.

Many: one `kvolt bench` on one core with 5,000 streams at once, the server on the other cores. All must be complete.

aiperf is installed into its own environment at the first run (--peer-dir, KVOLT_PEER; 1.2 GB, no torch).
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from benchmarks.harness import (
    Figure,
    Rows,
    cell,
    goal,
    in_turn,
    parser_for,
    peer_unless_smoke,
    report,
    run,
    say,
    table,
)
from benchmarks.load import canned
from benchmarks.load.generators import (
    AIPERF,
    KVOLT,
    Aiperf,
    Client,
    KvoltBench,
    Load,
    Seen,
    run_client,
)
from benchmarks.load.metered import Usage
from benchmarks.processes import Processes, clean_environ, free_port
from msgspec.structs import replace

GOAL_COST = 0.1
_INPUT_TOKENS = 32


class Pressure(msgspec.Struct, frozen=True):
    """Pace of canned answers."""

    streams: int
    output_tokens: int
    """Tokens of each answer."""
    tokens_per_s: int | None = None
    """Rate of all streams together; all clients must keep up with it. None: flat out."""

    @property
    def name(self) -> str:
        pace = "flat out" if self.tokens_per_s is None else f"paced, {self.tokens_per_s}/s"
        return f"{self.streams} streams, {pace}"

    @property
    def period_s(self) -> float:
        return 0.0 if self.tokens_per_s is None else self.streams / self.tokens_per_s


class Plan(msgspec.Struct, frozen=True):
    """Sizes of the measurement."""

    rounds: int
    pressures: tuple[Pressure, ...]
    requests: int
    streams: int
    streams_tokens_per_s: int
    streams_seconds: float


_FULL = Plan(
    rounds=3,
    pressures=(Pressure(16, 400), Pressure(256, 400), Pressure(64, 150, 10_000)),
    requests=512,
    streams=5000,
    streams_tokens_per_s=10_000,
    streams_seconds=15.0,
)
_SMOKE = Plan(
    rounds=1,
    pressures=(Pressure(4, 100, 2000),),
    requests=8,
    streams=20,
    streams_tokens_per_s=2000,
    streams_seconds=0.5,
)


class Cost(msgspec.Struct, frozen=True):
    """CPU time of a run: in total, and from its first request on."""

    whole_s: float
    work_s: float
    tokens: int


class CostRow(msgspec.Struct, frozen=True):
    """One client under one load in one round: a run with long answers, and one with as many of a single token."""

    round: int
    client: str
    load: str
    long: Cost
    short: Cost

    @property
    def cpu_us_per_token(self) -> float:
        return (self.long.work_s - self.short.work_s) / (self.long.tokens - self.short.tokens) * 1e6


class ManyRow(msgspec.Struct, frozen=True):
    """Many streams from one core."""

    streams: int
    peak: int
    """Concurrent streams, counted by the server."""
    answers: int
    failed: int
    wall_s: float
    rss_bytes: int
    cost: CostRow


def main() -> None:
    options = parser_for(__file__, __doc__, peer=AIPERF).parse_args()
    plan = _SMOKE if options.smoke else _FULL
    aiperf = peer_unless_smoke(options, Aiperf.installed)
    clients: list[Client] = [KvoltBench()] if aiperf is None else [KvoltBench(), aiperf]
    costs = _costs(clients, plan)
    many = _many(plan)
    about = f"{plan.rounds} rounds of {plan.requests} canned answers"
    results = {"peer": AIPERF, "plan": plan, "cost_rows": costs, "many": many}
    parts = [about, cost_text(costs), many_text(many)]
    report(options, "\n\n".join(parts), results)


def _costs(clients: Sequence[Client], plan: Plan) -> list[CostRow]:
    rows = []
    with ExitStack() as stack:
        ports = [stack.enter_context(serve_canned(pressure.period_s)) for pressure in plan.pressures]
        for number in range(1, plan.rounds + 1):
            for client in in_turn(clients, number):
                loads = [
                    _load(port, plan.requests, pressure.streams, pressure.output_tokens)
                    for port, pressure in zip(ports, plan.pressures, strict=True)
                ]
                short, *_ = _cost(client, replace(loads[0], output_tokens=1))
                for pressure, load in zip(plan.pressures, loads, strict=True):
                    row = CostRow(number, client.name, pressure.name, _cost(client, load)[0], short)
                    rows.append(row)
                    say(f"round {number}  {row.load}  {row.client}: {row.cpu_us_per_token:.2f} us per token")
    return rows


def _many(plan: Plan) -> ManyRow:
    first, *others = sorted(os.sched_getaffinity(0))
    period_s = plan.streams / plan.streams_tokens_per_s
    client = KvoltBench()
    with serve_canned(period_s, set(others) or None) as port:
        load = _load(port, plan.streams, plan.streams, round(plan.streams_seconds / period_s))
        short, *_ = _cost(client, replace(load, output_tokens=1), str(first))
        long, seen, used, load_seen = _cost(client, load, str(first))
    return ManyRow(
        streams=plan.streams,
        peak=load_seen.peak,
        answers=seen.answers,
        failed=seen.failed,
        wall_s=used.wall_s,
        rss_bytes=used.peak_rss_bytes,
        cost=CostRow(1, client.name, f"{plan.streams} streams, one core", long, short),
    )


def _cost(client: Client, load: Load, cores: str | None = None) -> tuple[Cost, Seen, Usage, Asked]:
    asked_of(load.port)  # to count anew
    seen, used = run_client(client, load, cores)
    load_seen = asked_of(load.port)
    return Cost(used.cpu_s, used.cpu_s_from(load_seen.began_s), seen.output_tokens), seen, used, load_seen


def _load(port: int, requests: int, streams: int, output_tokens: int) -> Load:
    return Load(
        port=port,
        model=canned.MODEL,
        concurrency=streams,
        requests=requests,
        input_tokens=_INPUT_TOKENS,
        output_tokens=output_tokens,
    )


# --- the canned server


class Asked(msgspec.Struct, frozen=True):
    """Counts of a canned server since the last request for them."""

    began_s: float
    """Time of its first request."""
    peak: int
    """Most streams at one time."""


@contextmanager
def serve_canned(period_s: float, cores: set[int] | None = None) -> Iterator[int]:
    """Port of a canned server, on the given cores only."""
    with Processes("canned") as processes:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.load.canned", str(port), f"{period_s * 1e3:g}"]
        process = processes.start("canned", command, clean_environ())
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)

        def answers() -> bool:
            try:
                return bool(asked_of(port))
            except OSError:
                return False

        processes.wait_for(answers, "answer")
        yield port


def asked_of(port: int) -> Asked:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/asked", timeout=30) as response:
        return msgspec.json.decode(response.read(), type=Asked)


# --- the report

_TOKENS = Figure("of tokens", "cpu_us_per_token")
_WHOLE = Figure("of the whole run", lambda row: row.long.whole_s / row.long.tokens * 1e6)


def cost_text(rows: Sequence[CostRow]) -> str:
    """Ratios of ours to theirs in each round: smaller is better."""
    body, goals = [], []
    for load, mine in Rows(rows).each("load"):
        sides = dict(mine.each("client"))
        for figure in (_TOKENS, _WHOLE):
            ratio = sides[KVOLT].over(sides.get(AIPERF, Rows([])), figure)
            cells = [each.cells([figure])[0] for each in sides.values()]
            body.append((load, figure.title, *cells, cell(ratio, ".3f")))
            if figure is _TOKENS and ratio:
                name = f"{load}: CPU per token at most {GOAL_COST:g} of {AIPERF}"
                goals.append(goal(name, ratio.median <= GOAL_COST, ratio.text(".3f")))
    return "\n".join([table(("load", "CPU us per token", *sides, f"{KVOLT} / {AIPERF}"), body), *goals])


def many_text(many: ManyRow) -> str:
    long = many.cost.long
    return goal(
        f"{many.streams} streams at once from one core, none failed",
        not many.failed and many.peak == many.answers == many.streams,
        f"{many.answers} whole, {many.peak} at once, {long.tokens / many.wall_s:,.0f} tokens/s, "
        f"{many.cost.cpu_us_per_token:.2f} CPU us per token, {long.whole_s / many.wall_s:.2f} cores, "
        f"{many.rss_bytes / (1 << 20):.0f} MiB",
    )


if __name__ == "__main__":
    run(main)
