"""`kvolt twin`: a trace through a modelled cluster, in a fraction of its time, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kvolt.bench.load.report import Report, RunFacts, Setting, encode_report, make_report
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import parse_sla
from kvolt.bench.traces import limit, read_trace, scale_time, small_trace, start_at_zero
from kvolt.cli.bench_screen import print_report
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord
from kvolt.engines.registry import parse_argument
from kvolt.engines.sim import SimArguments
from kvolt.runtime.config import LoadedConfig
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import new_tally, run_twin

HELP = """
Runs a trace through a model of the cluster: the real runtime, workers, scheduler, cache and journeys, on virtual time,
with simulated engines whose steps take as long as a preset says (`kvolt fit` makes one from a real engine's step log).
The same arguments give the same figures on any machine. The report is that of `kvolt bench`, so that
`kvolt bench compare` can hold a twin against a real run.

  kvolt twin                                         the project's own small trace on one worker
  kvolt twin trace.jsonl --workers 8 --preset h200-llama-8b
  kvolt twin trace.jsonl --speed 2 --limit 500       twice the load, the first 500 requests
  kvolt twin trace.jsonl --sla ttft=2s,itl=50ms      goodput
  kvolt twin trace.jsonl --arg block_size=64 --arg kv_blocks=16384
  kvolt twin trace.jsonl --json > twin.json          then: kvolt bench compare real.json twin.json

Ctrl-C ends it with a report of what was done so far.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="any format that `kvolt trace` reads")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="simulated workers (default: 1)")
    parser.add_argument("--preset", help="how long steps take: a name or a file (`kvolt engine list sim`)")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--sla", help="as `kvolt bench --sla`, for example ttft=500ms,itl=50ms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the sim engine, as `kvolt engine list sim` tells them (repeat for more)",
    )
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = _settings(args)
    records = _records(args)
    tally = new_tally(settings, parse_sla(args.sla) if args.sla else None)
    was_cut = False
    with _progress(len(records), args.quiet) as on_sample:
        try:
            run_twin(settings, records, tally, on_sample)
        except KeyboardInterrupt:
            was_cut = True
    report = make_report(_facts(args, settings, was_cut), tally)
    _tell(report, args.json)
    if was_cut:
        return 130
    return 0 if report.counts.whole else 1


def _settings(args: argparse.Namespace) -> TwinSettings:
    if args.workers < 1:
        raise ConfigError("a twin needs a worker", key="workers", remedy="give --workers 1 or more")
    given: dict[str, Any] = dict(parse_argument(text) for text in args.arg)
    if args.preset is not None:
        given["preset"] = args.preset
    try:
        engine = msgspec.convert(given, SimArguments)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"engine 'sim': {error}", key="arg", remedy="see `kvolt engine list sim`"
        ) from error
    return TwinSettings(num_workers=args.workers, engine=engine, seed=args.seed)


def _records(args: argparse.Namespace) -> list[TraceRecord]:
    if args.speed <= 0:
        raise ConfigError("a speed is above 0", key="speed", remedy="give for example --speed 2")
    records = small_trace() if args.trace is None else read_trace(args.trace)
    if args.limit is not None:
        records = limit(records, args.limit)
    return list(scale_time(start_at_zero(records), args.speed))


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Sample], None]]:
    """On stderr, so that stdout holds results only."""
    if quiet or not sys.stderr.isatty():
        yield lambda sample: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("requests", total=total)
        yield lambda sample: shown.update(task, advance=1)


def _facts(args: argparse.Namespace, settings: TwinSettings, was_cut: bool) -> RunFacts:
    told: dict[str, Setting] = {
        "trace": args.trace or "small",
        "workers": args.workers,
        "preset": settings.engine.preset,
        "speed": args.speed,
        "limit": args.limit,
        "seed": args.seed,
        "arguments": " ".join(args.arg),
    }
    return RunFacts(
        url="twin",
        model=settings.engine.preset,
        started_at=0.0,  # of virtual time: the report is a function of its arguments
        settings=told,
        was_cut=was_cut,
        open_loop=True,
    )


def _tell(report: Report, as_json: bool) -> None:
    if as_json:
        print(encode_report(report).decode(), end="")
    else:
        print_report(report)
