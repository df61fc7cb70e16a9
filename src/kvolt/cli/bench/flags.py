"""Flags of `kvolt bench`, and the pace, workload and client limits built from them."""

from __future__ import annotations

import argparse
import json
import random
import resource
from collections.abc import Iterator
from typing import Any

from kvolt.bench.load.bodies import Endpoint
from kvolt.bench.load.report import Setting
from kvolt.bench.load.runner import Pace
from kvolt.bench.load.schedules import bursts, constant, from_trace, poisson
from kvolt.bench.load.sla import parse_duration_s
from kvolt.bench.load.workloads import (
    Chats,
    FromTrace,
    PromptShape,
    Synthetic,
    Workload,
    parse_lengths,
    sessions_of,
)
from kvolt.bench.traces import ReadOptions, read_trace
from kvolt.cli.flags import option, repeated, switch
from kvolt.cli.health import add_server_flags
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

_DEFAULT_REQUESTS = 100
_MAX_CONNECTIONS = 10_000
_RESERVED_FILES = 64
"""File descriptors reserved for other uses."""


def add_server(group: argparse._ArgumentGroup) -> None:
    add_server_flags(group)
    option(group, "--connect-timeout", "TIME", "Connect timeout.", default="10s")
    option(group, "--first-token-timeout", "TIME", "Maximum TTFT.", default="300s")
    option(group, "--timeout", "TIME", "Maximum duration of a request.", default="1800s")
    option(group, "--connections", "N", "Maximum number of connections. Default: the open file limit.", int)


def add_load(group: argparse._ArgumentGroup) -> None:
    option(group, "--rate", "R", "Open loop: mean requests (or conversations) per second.", float)
    option(group, "--concurrency", "N", "Closed loop: number of concurrent users.", int)
    option(
        group,
        "--trace",
        "FILE",
        "Trace with prompt and output lengths: Mooncake JSONL, Azure CSV or ShareGPT JSON. Also sets the "
        "arrival times unless --rate or --concurrency is given.",
    )
    option(
        group,
        "--arrivals",
        None,
        "Arrival process of --rate; `burst` sends --burst requests at once.",
        default="poisson",
        choices=("poisson", "constant", "burst"),
    )
    option(group, "--burst", "N", "Requests per burst.", int, default=10)
    option(group, "--speed", "X", "Speed-up of the trace's times.", float, default=1.0)
    option(
        group,
        "--requests",
        "N",
        f"Number of measured requests. Default: {_DEFAULT_REQUESTS}, or the whole trace.",
        int,
    )
    option(group, "--duration", "TIME", "Send requests for this long, such as 60s, instead of --requests.")
    option(group, "--warmup", "N", "Initial requests to exclude.", int, default=0)


def add_prompts(group: argparse._ArgumentGroup) -> None:
    option(group, "--input", "N", "Prompt length in tokens, or a range such as 256-1024.", default="512")
    option(group, "--output", "N", "Output length in tokens, or a range.", default="128")
    option(group, "--shared-prefix", "N", "Prompt tokens that all requests share.", int, default=0)
    option(group, "--prefixes", "K", "Number of distinct shared prefixes, used in turn.", int, default=1)
    option(group, "--turns", "N", "Turns per conversation.", int, default=1)
    option(group, "--think", "TIME", "Pause between turns.", default="0s")
    group.add_argument(
        "--endpoint",
        choices=[str(name) for name in Endpoint],
        default=str(Endpoint.CHAT),
        help="Request type: chat messages, completion text, or completion token ids, which have exact lengths. "
        "[default: chat]",
    )
    option(group, "--vocabulary", "A-B", "Range of token ids for generated prompts.", default="100-900")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Request the full output length with `ignore_eos`. Disable it for servers that reject the field.",
    )
    repeated(group, "--set", "NAME=VALUE", "Request field, such as temperature=0.")


def add_results(group: argparse._ArgumentGroup) -> None:
    option(group, "--sla", "LIMITS", "Limits for goodput, such as ttft=500ms,itl=50ms,e2e=10s.")
    option(group, "--out", "DIR", "Write report.json, report.html and requests.csv to this directory.")
    switch(group, "--force", "Overwrite an existing report.")
    switch(group, "--json", "Print the report as JSON.")
    switch(group, "--quiet", "Show no progress.")
    option(group, "--drain", "TIME", "Time for running requests to finish after Ctrl-C.", default="5s")
    option(group, "--seed", None, "Seed of arrivals, lengths and prompts.", int, default=0)


def check_flags(args: argparse.Namespace) -> None:
    if args.rate is not None and args.concurrency is not None:
        raise ConfigError(
            "--rate and --concurrency are mutually exclusive",
            key="rate",
            remedy="use --rate for an open loop, --concurrency for a closed loop",
        )
    if args.rate is None and args.concurrency is None and args.trace is None:
        raise ConfigError(
            "no load is specified",
            key="rate",
            remedy="use one of --rate R, --concurrency N, --trace FILE; see `kvolt bench --help`",
        )
    if args.requests is not None and args.duration is not None:
        raise ConfigError(
            "--requests and --duration are mutually exclusive", key="requests", remedy="use one of them"
        )
    for name, least in (("concurrency", 1), ("requests", 1), ("warmup", 0), ("connections", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}", key=name, remedy=f"must be {least} or more")
    if args.turns > 1 and (args.endpoint != Endpoint.CHAT or args.trace):
        raise ConfigError(
            "--turns requires generated chat prompts", key="turns", remedy="omit --trace and --endpoint"
        )


def max_connections(args: argparse.Namespace) -> int:
    """Maximum number of connections that the open file limit allows. Raises the soft limit to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    most = _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, soft - _RESERVED_FILES)
    num_connections: int = args.connections or args.concurrency or min(most, _MAX_CONNECTIONS)
    if num_connections > most:
        raise ConfigError(
            f"{num_connections} connections exceed the open file limit, which allows {most}",
            key="connections",
            remedy="raise `ulimit -n` or use fewer",
        )
    return num_connections


def positive_s(text: str, key: str) -> float:
    seconds = parse_duration_s(text, key)
    if not seconds > 0:
        raise ConfigError(f"--{key.replace('_', '-')} is 0", key=key, remedy="must be above 0")
    return seconds


def trace_records(trace: str | None) -> list[TraceRecord] | None:
    return None if trace is None else list(read_trace(trace, ReadOptions()))


def pace_of(args: argparse.Namespace, records: list[TraceRecord] | None) -> Pace:
    num_requests = args.requests
    if num_requests is None and args.duration is None:
        num_requests = _DEFAULT_REQUESTS if records is None else max(1, len(records) - args.warmup)
    return Pace(
        schedule=_schedule(args, records),
        concurrency=args.concurrency,
        num_requests=num_requests,
        duration_s=None if args.duration is None else positive_s(args.duration, "duration"),
        num_warmup=args.warmup,
        drain_s=parse_duration_s(args.drain, "drain"),
        first_token_s=positive_s(args.first_token_timeout, "first_token_timeout"),
        total_s=positive_s(args.timeout, "timeout"),
    )


def _schedule(args: argparse.Namespace, records: list[TraceRecord] | None) -> Iterator[float] | None:
    """Start times of an open loop; None for a closed loop. Without --rate the trace's own times are used."""
    if args.concurrency is not None:
        return None
    if args.rate is None:
        assert records is not None, "check_flags ensures it"
        starts = [records[places[0]] for places in sessions_of(records)]
        if len(starts) > 1 and starts[0].timestamp == starts[-1].timestamp:
            raise ConfigError(
                f"{args.trace} has no timestamps",
                key="trace",
                remedy="set --rate or --concurrency",
            )
        return from_trace(starts, args.speed)
    match args.arrivals:
        case "constant":
            return constant(args.rate)
        case "burst":
            return bursts(args.rate, args.burst)
        case _:
            return poisson(args.rate, random.Random(args.seed).random)


def workload_of(args: argparse.Namespace, records: list[TraceRecord] | None) -> Workload:
    ids = parse_lengths(args.vocabulary, "vocabulary")
    shape = PromptShape(
        input=parse_lengths(args.input, "input"),
        output=parse_lengths(args.output, "output"),
        shared_prefix=args.shared_prefix,
        num_prefixes=args.prefixes,
        vocabulary=(ids.low, ids.high),
    )
    shape.check()
    if records is not None:
        return FromTrace(records, args.seed, shape.vocabulary, args.speed)
    if args.turns != 1:
        return Chats(shape, args.turns, parse_duration_s(args.think, "think"), args.seed)
    return Synthetic(shape, args.seed)


def request_fields(assignments: list[str]) -> dict[str, Any]:
    """Fields of `--set NAME=VALUE`; a VALUE that is not JSON is a string."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"--set {assignment}: expected NAME=VALUE", key="set", remedy="e.g. --set temperature=0"
            )
        try:
            fields[name.strip()] = json.loads(text)
        except ValueError:
            fields[name.strip()] = text
    return fields


def report_settings(args: argparse.Namespace) -> dict[str, Setting]:
    """Flags that determine the load, for the report; excludes credentials and output options."""
    excluded = {
        "url",
        "model",
        "api_key",
        "config",
        "overrides",
        "out",
        "force",
        "json",
        "quiet",
        "drain",
        "sla",
        "bench_verb",
    }
    return {
        name: value if isinstance(value, int | float | str) else None if value is None else str(value)
        for name, value in sorted(vars(args).items())
        if name not in excluded and value not in (None, [])
    }
