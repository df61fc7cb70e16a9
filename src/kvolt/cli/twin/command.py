"""`kvolt twin`: a trace through a modelled cluster, in a fraction of its time, without a GPU."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from kvolt.bench.load.report import RunFacts, encode_report
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import parse_sla
from kvolt.cli.report_files import WRITTEN, open_rows, write_report
from kvolt.cli.twin.flags import add_cluster, records_of, settings_of, told_settings
from kvolt.cli.twin.screen import ending, print_twin, progress
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.twin.page import twin_page
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import TwinReport, make_twin_report

HELP = """
Runs a trace through a model of the cluster: the real runtime, workers, scheduler, cache and journeys, on virtual time,
with simulated engines whose steps take as long as a preset says (`kvolt fit` makes one from a real engine's step log).
The same arguments give the same figures on any machine. The report is that of `kvolt bench`, so that
`kvolt bench compare` can hold a twin against a real run; besides it tells what the cluster cost, how busy it was,
what its caches found, and why requests missed the SLA.

  kvolt twin                                         the project's own small trace on one worker
  kvolt twin trace.jsonl --workers 8 --preset h200-llama-8b
  kvolt twin trace.jsonl --workers 8 --router least-loaded
  kvolt twin trace.jsonl --speed 2 --limit 500       twice the load, the first 500 requests
  kvolt twin trace.jsonl --sla ttft=2s,itl=50ms      goodput, and who missed it why
  kvolt twin trace.jsonl --arg block_size=64 --arg kv_blocks=16384
  kvolt twin trace.jsonl --out today                 report.json, report.html with plots, requests.csv
  kvolt twin sweep trace.jsonl --axis workers=2,4,8  many such clusters: which are worth their GPUs

Ctrl-C ends it with a report of what was done so far, marked as cut; a second one ends at once.

Exits with 0, with 1 when no request was answered, with 130 when cut.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--out", metavar="DIR", help=f"folder for {WRITTEN}")
    group.add_argument("--force", action="store_true", help="write over a report in that folder")
    group.add_argument("--json", action="store_true", help="the whole report as JSON")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    settings = settings_of(args)
    records = records_of(args)
    twin = TwinRun(settings, new_tally(settings, parse_sla(args.sla) if args.sla else None))
    folder = Path(args.out) if args.out else None
    with ExitStack() as files:
        rows = open_rows(folder, args.force, files) if folder is not None else None
        step = files.enter_context(progress("requests", len(records), args.quiet))

        def on_sample(sample: Sample) -> None:
            step()
            if rows is not None:
                rows.add(sample, True)

        with ending(twin.end):
            twin.run(records, on_sample)
    report = make_twin_report(
        RunFacts(
            url="twin",
            model=settings.engine.preset,
            started_at=0.0,  # of virtual time: the report is a function of its arguments
            settings=told_settings(args, settings),
            was_cut=twin.was_cut,
            open_loop=True,
        ),
        twin,
    )
    _tell(report, folder, args.json)
    if report.was_cut:
        return 130
    return 0 if report.counts.whole else 1


def _tell(report: TwinReport, folder: Path | None, as_json: bool) -> None:
    if folder is not None:
        try:
            write_report(folder, report, twin_page(report))
        except ConfigError:
            print_twin(report)
            raise
    if as_json:
        print(encode_report(report).decode(), end="")
        return
    print_twin(report)
    if folder is not None:
        print(f"written to {folder}: {WRITTEN}")
