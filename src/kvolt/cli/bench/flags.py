"""The flags of `kvolt bench`, and what they mean: server, pace, workload, limits."""

from __future__ import annotations

import argparse
import json
import random
import resource
from collections.abc import Iterator, Mapping
from typing import Any

from kvolt.bench.load.bodies import Endpoint
from kvolt.bench.load.client import ClientLimits
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
from kvolt.cli.health import base_url
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.runtime.config.settings import Settings

_DEFAULT_REQUESTS = 100
_KEPT_FILES = 64
"""Files that are no connections."""


def add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url", help="default: env OPENAI_BASE_URL, or where `kvolt serve` listens by its settings"
    )
    group.add_argument("--model", metavar="NAME", help="default: the only one that the server lists")
    group.add_argument(
        "--api-key", metavar="KEY", help="sent as a bearer token (default: env OPENAI_API_KEY)"
    )
    group.add_argument("--connect-timeout", metavar="TIME", default="10s", help="default: 10s")
    group.add_argument("--first-token-timeout", metavar="TIME", default="300s", help="default: 300s")
    group.add_argument(
        "--timeout", metavar="TIME", default="1800s", help="for a whole answer (default: 1800s)"
    )
    group.add_argument(
        "--connections", type=int, metavar="N", help="at most (default: as many as files may be open)"
    )
    group.add_argument("--config", metavar="FILE", help="TOML file with settings (env KVOLT_CONFIG)")


def add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate", type=float, metavar="R", help="requests (or conversations) a second, open loop"
    )
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="users who ask one after another, closed loop"
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="Mooncake JSONL, Azure CSV or ShareGPT JSON; when to ask too, unless given",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "burst"),
        default="poisson",
        help="with --rate: independent users, even gaps, or --burst at once (default: poisson)",
    )
    group.add_argument("--burst", type=int, default=10, metavar="N", help="requests of a burst (default: 10)")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace (default: 1)")
    group.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"how many count (default: {_DEFAULT_REQUESTS}, or the whole trace)",
    )
    group.add_argument("--duration", metavar="TIME", help="send for so long instead, e.g. 60s")
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="first N requests do not count (default: 0)"
    )


def add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input", default="512", metavar="N", help="tokens, or 256-1024 (default: 512)")
    group.add_argument("--output", default="128", metavar="N", help="tokens, or 64-256 (default: 128)")
    group.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens of the input that all have in common",
    )
    group.add_argument(
        "--prefixes",
        type=int,
        default=1,
        metavar="K",
        help="different shared prefixes, taken in turn (default: 1)",
    )
    group.add_argument(
        "--turns", type=int, default=1, metavar="N", help="questions of a conversation (default: 1)"
    )
    group.add_argument("--think", default="0s", metavar="TIME", help="from an answer to the next question")
    group.add_argument(
        "--endpoint",
        choices=[str(name) for name in Endpoint],
        default=str(Endpoint.CHAT),
        help="chat messages, a completion's text, or its token ids, which have exact lengths (default: chat)",
    )
    group.add_argument(
        "--vocabulary", default="100-900", metavar="A-B", help="token ids used (default: 100-900)"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length; servers that refuse the field need --no-ignore-eos",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of each request, e.g. temperature=0",
    )


def add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sla", metavar="LIMITS", help="for goodput, e.g. ttft=500ms,itl=50ms,e2e=10s")
    group.add_argument("--out", metavar="DIR", help="folder for report.json, report.html, requests.csv")
    group.add_argument("--force", action="store_true", help="write over a report in that folder")
    group.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument(
        "--drain", default="5s", metavar="TIME", help="for answers under way at Ctrl-C (default: 5s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts (default: 0)")


def server_url(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> str:
    """Flags before environment before settings, as everywhere."""
    given = args.url or environ.get("OPENAI_BASE_URL")
    if given:
        return str(given)
    frontend = settings.frontend
    if not frontend.port:
        raise ConfigError("frontend.port is 0, which is no address", key="url", remedy="give --url HOST:PORT")
    return base_url(frontend.host, frontend.port)


def check_flags(args: argparse.Namespace) -> None:
    if args.rate is not None and args.concurrency is not None:
        raise ConfigError(
            "--rate and --concurrency exclude each other",
            key="rate",
            remedy="--rate for an open loop, --concurrency for a closed one",
        )
    if args.rate is None and args.concurrency is None and args.trace is None:
        raise ConfigError(
            "choose how requests come",
            key="rate",
            remedy="give one of --rate R, --concurrency N, --trace FILE; see `kvolt bench --help`",
        )
    if args.requests is not None and args.duration is not None:
        raise ConfigError(
            "--requests and --duration exclude each other", key="requests", remedy="give one of them"
        )
    for name, least in (("concurrency", 1), ("requests", 1), ("warmup", 0), ("connections", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} is {value}", key=name, remedy=f"give {least} or more")
    if args.turns > 1 and (args.endpoint != Endpoint.CHAT or args.trace):
        raise ConfigError(
            "--turns needs chat messages of its own", key="turns", remedy="leave out --trace and --endpoint"
        )


def client_limits(args: argparse.Namespace) -> ClientLimits:
    """As many connections as the system lets us have; raises our own limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    most = ClientLimits().max_connections if soft == resource.RLIM_INFINITY else max(1, soft - _KEPT_FILES)
    wanted = args.connections or args.concurrency or min(most, ClientLimits().max_connections)
    if wanted > most:
        raise ConfigError(
            f"{wanted} connections are more than the {most} that this system allows",
            key="connections",
            remedy="raise `ulimit -n`, or use fewer",
        )
    return ClientLimits(
        connect_s=_positive_s(args.connect_timeout, "connect_timeout"),
        first_token_s=_positive_s(args.first_token_timeout, "first_token_timeout"),
        total_s=_positive_s(args.timeout, "timeout"),
        max_connections=wanted,
    )


def _positive_s(text: str, key: str) -> float:
    seconds = parse_duration_s(text, key)
    if not seconds > 0:
        raise ConfigError(f"--{key.replace('_', '-')} is 0", key=key, remedy="give a time above 0")
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
        duration_s=None if args.duration is None else _positive_s(args.duration, "duration"),
        num_warmup=args.warmup,
        drain_s=parse_duration_s(args.drain, "drain"),
    )


def _schedule(args: argparse.Namespace, records: list[TraceRecord] | None) -> Iterator[float] | None:
    """None for a closed loop. A trace has its own times where no others are asked for."""
    if args.concurrency is not None:
        return None
    if args.rate is None:
        assert records is not None, "the flags were checked"
        starts = [records[places[0]] for places in sessions_of(records)]
        if len(starts) > 1 and starts[0].timestamp == starts[-1].timestamp:
            raise ConfigError(
                f"{args.trace} has no times: everything in it is due at once",
                key="trace",
                remedy="say when with --rate or --concurrency",
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


def request_fields(given: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {each} is no NAME=VALUE", key="set", remedy="e.g. --set temperature=0")
        try:
            fields[name.strip()] = json.loads(text)
        except ValueError:
            fields[name.strip()] = text  # what is no JSON is a string
    return fields


def report_settings(args: argparse.Namespace) -> dict[str, Setting]:
    """What decides the load, for the report; neither keys nor where it is written."""
    left_out = {
        "url",
        "model",
        "api_key",
        "config",
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
        if name not in left_out and value not in (None, [])
    }
