"""`kvolt bench` beside aiperf: do they see the same, and what does a token cost each?

    python -m benchmarks.load.clients             all of it, about six minutes; kept in results/clients.{json,txt}
    python -m benchmarks.load.clients --quick     a first look, not kept

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
  a lean client's CPU is that of being woken and of reading, which `bare reads` shows: nobody can be cheaper than this.

All clients under each load in each round, in an order that changes; a ratio is of one round.

Many: one `kvolt bench` on one core with 5,000 streams at once, the server on the others. All must be whole.

aiperf is installed into an environment of its own at the first run (--peer-dir, KVOLT_PEER; 1.2 GB, no torch).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from benchmarks.frontend.peer import default_folder
from benchmarks.load import aiperf, canned, report
from benchmarks.load.bare import BareReads
from benchmarks.load.client import Client, Load, Run, run
from benchmarks.load.kvolt_bench import KvoltBench
from benchmarks.load.report import AgreementRow, Cost, CostRow, ManyRow
from benchmarks.load.serving import SIM_MODEL, Asked, asked_of, serve_canned, serve_sim
from benchmarks.runtime.pair import BrokenRun
from benchmarks.runtime.report import keep_results, machine
from msgspec.structs import replace

_RESULTS = Path(__file__).parent / "results" / "clients"
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
_QUICK = Plan(
    rounds=1,
    pressures=(Pressure(64, 400), Pressure(64, 150, 10_000)),
    requests=256,
    agreement_rate=8.0,
    agreement_requests=24,
    streams=500,
    streams_tokens_per_s=5000,
    streams_seconds=4.0,
)


def main() -> None:
    options = _options()
    plan = _QUICK if options.quick else _FULL
    try:
        peer = aiperf.installed(options.peer_dir)
        found = machine()
        agreement = _agreement([KvoltBench(), peer], plan)
        costs = _costs([BareReads(), KvoltBench(), peer], plan)
        many = _many(plan)
    except BrokenRun as error:
        sys.exit(f"no figures: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    agreed, cost = report.agreement_lines(agreement), report.cost_lines(costs)
    text = "\n\n".join(
        [
            _about(plan),
            report.agreement_text(agreed, agreement),
            report.cost_text(cost),
            report.many_text(many),
        ]
    )
    print(text)
    out = options.out if options.out is not None else None if options.quick else _RESULTS
    if out is not None:
        results = {
            "peer": aiperf.NAME,
            "plan": plan,
            "agreement": agreed,
            "cost": cost,
            "agreement_rows": agreement,
            "cost_rows": costs,
            "many": many,
        }
        keep_results(out, "benchmarks.load.clients", found, text, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load.clients", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round: for a look, not for a claim")
    parser.add_argument(
        "--peer-dir", type=Path, default=default_folder(), help="where aiperf is or will be installed"
    )
    parser.add_argument("--out", type=Path, help="write PATH.json and PATH.txt (default: results/clients)")
    return parser.parse_args()


def _about(plan: Plan) -> str:
    return (
        f"{plan.rounds} rounds. Agreement: sim engine, {plan.agreement_requests} requests at "
        f"{plan.agreement_rate:g}/s. Cost: {plan.requests} canned answers."
    )


def _in_turn(clients: Sequence[Client], number: int) -> Sequence[Client]:
    return clients if number % 2 else clients[::-1]


def _agreement(clients: Sequence[Client], plan: Plan) -> list[AgreementRow]:
    rows = []
    with serve_sim() as port:
        load = Load(
            port=port,
            model=SIM_MODEL,
            rate=plan.agreement_rate,
            requests=plan.agreement_requests,
            input_tokens=128,
            output_tokens=32,
        )
        for number in range(1, plan.rounds + 1):
            for client in _in_turn(clients, number):
                seen = run(client, load).seen
                rows.append(AgreementRow(number, client.name, seen))
                _tell(f"round {number}  agreement  {client.name:14} ttft p50 {seen.first.p50:.2f} ms")
    return rows


def _costs(clients: Sequence[Client], plan: Plan) -> list[CostRow]:
    rows = []
    with ExitStack() as stack:
        ports = [stack.enter_context(serve_canned(pressure.period_s)) for pressure in plan.pressures]
        for number in range(1, plan.rounds + 1):
            for client in _in_turn(clients, number):
                loads = [
                    _load(port, plan.requests, pressure.streams, pressure.output_tokens)
                    for port, pressure in zip(ports, plan.pressures, strict=True)
                ]
                short, _, _ = _cost(client, replace(loads[0], output_tokens=1))
                for pressure, load in zip(plan.pressures, loads, strict=True):
                    long, _, _ = _cost(client, load)
                    row = CostRow(number, client.name, pressure.name, long, short)
                    rows.append(row)
                    _tell(
                        f"round {number}  {row.load}  {row.client}: {row.cpu_us_per_token:.2f} us per token"
                    )
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
    ran = run(client, load, cores)
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


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
