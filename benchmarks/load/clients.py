"""`kvolt bench` beside aiperf: do they see the same, and what does a token cost each?

    python -m benchmarks.load.clients             all of it, about six minutes; kept in results/clients.{json,txt}

Agreement: both ask the same `kvolt serve` with the sim engine, at a low constant rate, in turn, in every round. TTFT,
gap between tokens and time per token of each; aiperf calls the gap "inter chunk latency" and the time per token "inter
token latency". They agree when their medians lie within 5 %, or when the spread of one reaches into that of the other.

Cost: CPU is user and system time of all processes of a client. Of tokens: what is used from the first request on, in a
run with long answers less in one with as many requests for a single token, over the tokens that the first has more;
neither start nor requests are in it. Of the whole run: all CPU over all tokens. The server (`canned`) has its answers
ready:

- *flat out*: an answer comes as fast as it is read, many tokens in one read, so what is measured is what a client does
  with a token.
- *paced*: each token comes alone, in a write of its own, at 10,000 a second in all streams together. Then most of
  a lean client's CPU is that of being woken and of reading, which `bare reads` shows: a lower bound.

All clients under each load in each round, in an order that changes; a ratio is of one round.

Many: one `kvolt bench` on one core with 5,000 streams at once, the server on the others. All must be whole.

aiperf is installed into an environment of its own at the first run (--peer-dir, KVOLT_PEER; 1.2 GB, no torch).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
from benchmarks.harness import Missing, in_turn, parser_for, run, say
from benchmarks.harness import report as write_report
from benchmarks.load import aiperf, canned, report
from benchmarks.load.bare import BareReads
from benchmarks.load.client import Client, Load, Run
from benchmarks.load.client import run as run_client
from benchmarks.load.kvolt_bench import KvoltBench
from benchmarks.load.report import AgreementRow, Cost, CostRow, ManyRow
from benchmarks.load.serving import Asked, asked_of, serve_canned
from benchmarks.processes import System, served
from msgspec.structs import replace

_INPUT_TOKENS = 32


class Pressure(msgspec.Struct, frozen=True):
    """How canned answers come."""

    streams: int
    output_tokens: int
    """Of each answer."""
    tokens_per_s: int | None = None
    """Of all streams together; all clients must keep up with it. None: flat out."""

    @property
    def name(self) -> str:
        pace = "flat out" if self.tokens_per_s is None else f"paced, {self.tokens_per_s}/s"
        return f"{self.streams} streams, {pace}"

    @property
    def period_s(self) -> float:
        return 0.0 if self.tokens_per_s is None else self.streams / self.tokens_per_s


class Plan(msgspec.Struct, frozen=True):
    """What to measure."""

    rounds: int
    pressures: tuple[Pressure, ...]
    requests: int
    agreement_rate: float
    agreement_requests: int
    streams: int
    streams_tokens_per_s: int
    streams_seconds: float


_FULL = Plan(
    rounds=3,
    pressures=(Pressure(16, 400), Pressure(256, 400), Pressure(64, 150, 10_000)),
    requests=512,
    agreement_rate=8.0,
    agreement_requests=64,
    streams=5000,
    streams_tokens_per_s=10_000,
    streams_seconds=15.0,
)
_SMOKE = Plan(
    rounds=1,
    pressures=(Pressure(4, 100, 2000),),
    requests=8,
    agreement_rate=20.0,
    agreement_requests=4,
    streams=20,
    streams_tokens_per_s=2000,
    streams_seconds=0.5,
)


def main() -> None:
    options = parser_for(__file__, __doc__, peer=aiperf.NAME).parse_args()
    plan = _SMOKE if options.smoke else _FULL
    clients: list[Client] = [KvoltBench()]
    try:
        clients.append(aiperf.installed(options.peer_dir, may_install=not options.smoke))
    except Missing:
        if not options.smoke:
            raise
    agreement = _agreement(clients, plan)
    costs = _costs([BareReads(), *clients], plan)
    many = _many(plan)
    agreed, cost = report.agreement_lines(agreement), report.cost_lines(costs)
    parts = [report.agreement_text(agreed, agreement), report.cost_text(cost), report.many_text(many)]
    results = {
        "peer": aiperf.NAME,
        "plan": plan,
        "agreement": agreed,
        "cost": cost,
        "agreement_rows": agreement,
        "cost_rows": costs,
        "many": many,
    }
    write_report(options, "\n\n".join([_about(plan), *parts]), results)


def _about(plan: Plan) -> str:
    return (
        f"{plan.rounds} rounds. Agreement: sim engine, {plan.agreement_requests} requests at "
        f"{plan.agreement_rate:g}/s. Cost: {plan.requests} canned answers."
    )


def _agreement(clients: Sequence[Client], plan: Plan) -> list[AgreementRow]:
    rows = []
    with served(System(model="sim-tiny")) as url:
        load = Load(
            port=int(url.rpartition(":")[2]),
            model="sim-tiny",
            rate=plan.agreement_rate,
            requests=plan.agreement_requests,
            input_tokens=128,
            output_tokens=32,
        )
        for number in range(1, plan.rounds + 1):
            for client in in_turn(clients, number):
                seen = run_client(client, load).seen
                rows.append(AgreementRow(number, client.name, seen))
                say(f"round {number}  agreement  {client.name:14} ttft p50 {seen.first.p50:.2f} ms")
    return rows


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
                short, _, _ = _cost(client, replace(loads[0], output_tokens=1))
                for pressure, load in zip(plan.pressures, loads, strict=True):
                    long, _, _ = _cost(client, load)
                    row = CostRow(number, client.name, pressure.name, long, short)
                    rows.append(row)
                    say(f"round {number}  {row.load}  {row.client}: {row.cpu_us_per_token:.2f} us per token")
    return rows


def _many(plan: Plan) -> ManyRow:
    first, *others = sorted(os.sched_getaffinity(0))
    period_s = plan.streams / plan.streams_tokens_per_s
    client = KvoltBench()
    with serve_canned(period_s, set(others) or None) as port:
        load = _load(port, plan.streams, plan.streams, round(plan.streams_seconds / period_s))
        short, _, _ = _cost(client, replace(load, output_tokens=1), str(first))
        long, ran, asked = _cost(client, load, str(first))
    return ManyRow(
        streams=plan.streams,
        peak=asked.peak,
        answers=ran.seen.answers,
        failed=ran.seen.failed,
        wall_s=ran.used.wall_s,
        rss_bytes=ran.used.peak_rss_bytes,
        cost=CostRow(1, client.name, f"{plan.streams} streams, one core", long, short),
    )


def _cost(client: Client, load: Load, cores: str | None = None) -> tuple[Cost, Run, Asked]:
    asked_of(load.port)  # to count anew
    ran = run_client(client, load, cores)
    asked = asked_of(load.port)
    return Cost(ran.used.cpu_s, ran.used.cpu_s_from(asked.began_s), ran.seen.output_tokens), ran, asked


def _load(port: int, requests: int, streams: int, output_tokens: int) -> Load:
    return Load(
        port=port,
        model=canned.MODEL,
        concurrency=streams,
        requests=requests,
        input_tokens=_INPUT_TOKENS,
        output_tokens=output_tokens,
    )


if __name__ == "__main__":
    run(main)
