"""`kvolt bench`: load-test an OpenAI-compatible server, and compare two reports."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvolt.bench.load.bodies import Endpoint, RequestMaker
from kvolt.bench.load.compare import compare, differing_settings
from kvolt.bench.load.page import html_page
from kvolt.bench.load.report import BenchReport, RunFacts, decode_report, make_report
from kvolt.bench.load.runner import LoadRun, Pace
from kvolt.bench.load.sample import Rows
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.load.tally import Tally
from kvolt.bench.load.workloads import Workload
from kvolt.cli.bench.flags import (
    add_load,
    add_prompts,
    add_results,
    add_server,
    check_flags,
    max_connections,
    pace_of,
    positive_s,
    report_settings,
    request_fields,
    trace_records,
    workload_of,
)
from kvolt.cli.bench.screen import BenchProgress, open_rows, output_report, print_changes, print_report
from kvolt.cli.chat.client import ChatClient
from kvolt.cli.flags import option, switch
from kvolt.cli.health import api_url
from kvolt.cli.process import run_loop
from kvolt.cli.progress import run_until_signal
from kvolt.core.errors import ConfigError, ConnectFailed, DeadlineExceeded, KvoltError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.server_url import ServerUrl

HELP = """
Load-test an OpenAI-compatible server (kvolt, vLLM, SGLang or any other) and report latencies and throughput.

Load:
  --rate 10            open loop: 10 requests per second, regardless of the server's responses. Latencies count from
                       the scheduled start, so a stalled server cannot hide queueing (no coordinated omission).
  --concurrency 32     closed loop: 32 users, each sends its next request when the previous one is finished. Use it
                       to find the maximum throughput.
  --trace FILE         open loop with the times and lengths of a trace (see `kvolt trace`); with --rate or
                       --concurrency only its lengths and shared prefixes

Examples:
  kvolt bench --rate 10 --requests 300                         the local `kvolt serve`
  kvolt bench --url http://10.0.0.5:8000 --concurrency 64 --duration 60s --warmup 64
  kvolt bench --rate 20 --input 2048 --output 128 --shared-prefix 1536 --sla ttft=500ms,itl=50ms --out before
  kvolt bench --rate 5 --turns 4 --think 2s                    multi-turn conversations
  kvolt bench --trace conversation.jsonl --speed 0.5 --endpoint tokens --out replay
  kvolt bench --trace sharegpt.json --concurrency 32           its conversations, by 32 users
  kvolt bench compare before after                             differences with confidence intervals

Metrics: ttft, scheduled start to first token; ttst, first to second token; itl, each gap between tokens; tpot, mean
time per token after the first; e2e, the whole request. Token counts are the server's usage. Ctrl-C stops the run and
reports what was measured; a second Ctrl-C exits at once.

Exit code: 0; 1 if no request succeeded; 130 if interrupted.
"""


_LISTING_TIMEOUT_S = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    add_server(parser.add_argument_group("server"))
    add_load(parser.add_argument_group("load"))
    add_prompts(parser.add_argument_group("requests"))
    add_results(parser.add_argument_group("results"))
    verbs = parser.add_subparsers(metavar="compare", dest="bench_verb", required=False)
    comparing = verbs.add_parser("compare", help="compare two reports: differences with confidence intervals")
    comparing.add_argument("first", metavar="A", help="First report.json, or its directory.")
    comparing.add_argument("second", metavar="B", help="Second report.json, or its directory.")
    option(comparing, "--seed", None, "Seed of the bootstrap samples.", int, default=0)
    switch(comparing, "--json", "Print JSON.")
    comparing.set_defaults(without_config=_compare)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The validated run, built before the first request."""

    server: ServerUrl
    connect_s: float
    max_connections: int
    pace: Pace
    workload: Workload
    fields: dict[str, Any]
    tally: Tally


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    plan = _plan(args, loaded)
    folder = Path(args.out) if args.out else None
    reports: list[BenchReport] = []
    with ExitStack() as files:
        rows = open_rows(folder, args.force, files) if folder is not None else None

        async def main() -> int:
            reports.append(await _measure(args, plan, rows))
            return 0

        run_loop(main)
    [report] = reports
    return output_report(report, html_page(report), lambda: print_report(report), folder, args.json)


def _plan(args: argparse.Namespace, loaded: LoadedConfig) -> _Plan:
    server = api_url(args, loaded, os.environ)
    check_flags(args)
    records = trace_records(args.trace)
    return _Plan(
        server,
        positive_s(args.connect_timeout, "connect_timeout"),
        max_connections(args),
        pace_of(args, records),
        workload_of(args, records),
        request_fields(args.set),
        Tally(parse_sla(args.sla) if args.sla else None, random.Random(args.seed).random),
    )


async def _measure(args: argparse.Namespace, plan: _Plan, rows: Rows | None) -> BenchReport:
    clock = SystemClock()
    tally = plan.tally
    model = await _find_model(plan.server, args.model, plan.connect_s)
    maker = RequestMaker(model, Endpoint(args.endpoint), plan.fields, args.ignore_eos)
    async with HttpClient(
        plan.server,
        connect_s=plan.connect_s,
        max_connections=plan.max_connections,
        max_idle=plan.max_connections,
        now=clock.monotonic,
    ) as client:
        load = LoadRun(client, plan.workload, maker, plan.pace, tally)
        if rows is not None:
            load.on_sample = rows.add
        started_at = clock.wall()
        show = None if args.quiet else BenchProgress(load, tally).show()
        await run_until_signal(load.run(), load.end, show)
    facts = RunFacts(
        url=plan.server.text,
        model=model,
        started_at=started_at,
        settings=report_settings(args),
        is_interrupted=load.is_interrupted,
        open_loop=plan.pace.schedule is not None,
    )
    return make_report(facts, tally)


async def _find_model(server: ServerUrl, requested: str | None, connect_s: float) -> str:
    """The requested model, or the only one. Raises ConfigError if the server is unreachable or has several models."""
    try:
        names = await _list_models(ChatClient(server, _LISTING_TIMEOUT_S, connect_s))
    except KvoltError as error:
        if requested is not None and not isinstance(error, ConnectFailed):
            return requested  # not every server lists its models
        problem = "is unreachable" if isinstance(error, ConnectFailed) else "lists no models"
        remedy = error.fields.get("remedy") or "check --url, or set --model"
        raise ConfigError(f"{server.text} {problem}: {error.message}", key="url", remedy=remedy) from error
    if requested is not None:
        return requested
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{server.text} serves no model", key="model", remedy="see `kvolt status`")
    raise ConfigError(
        f"{server.text} serves {len(names)} models: {', '.join(names)}",
        key="model",
        remedy="choose with --model NAME",
    )


async def _list_models(client: ChatClient) -> list[str]:
    try:
        async with asyncio.timeout(_LISTING_TIMEOUT_S):
            return await client.models()
    except TimeoutError:
        message = f"no model list within {_LISTING_TIMEOUT_S:g} s"
        raise DeadlineExceeded(message, stage="total", after_s=_LISTING_TIMEOUT_S) from None


def _compare(args: argparse.Namespace) -> int:
    first, second = _read_report(args.first), _read_report(args.second)
    changes = compare(first, second, args.seed)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(changes), indent=2) + b"\n")
    else:
        print_changes(changes, differing_settings(first, second))
    return 0


def _read_report(name: str) -> BenchReport:
    path = Path(name)
    try:
        path = path / "report.json" if path.is_dir() else path
        return decode_report(path.read_bytes(), str(path))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot read {path}: {reason}", key="report", remedy="name a report.json"
        ) from error
