"""`kvolt twin`: replay a trace on a simulated cluster under virtual time."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from kvolt.api.progress import progress
from kvolt.bench.load.report import RunFacts
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.sla import parse_sla
from kvolt.cli.bench.screen import WRITTEN, open_rows, output_report
from kvolt.cli.flags import option, switch
from kvolt.cli.progress import ending
from kvolt.cli.twin.flags import add_cluster, records_of, report_settings, settings_of
from kvolt.cli.twin.screen import print_twin
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.twin.page import twin_page
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import make_twin_report

HELP = """
Replay a trace on a simulated cluster: the real runtime, workers, scheduler, cache and router under virtual time, with
simulated engines whose step times come from a preset (`kvolt fit` makes one from a step log). Deterministic: the same
arguments give the same report on any machine. The report has the format of `kvolt bench`, so that
`kvolt bench compare` can compare both, plus cost, utilization, cache hits and the causes of SLA misses.

Examples:
  kvolt twin                                         a small built-in trace on one worker
  kvolt twin trace.jsonl --workers 8 --preset h200-llama-8b
  kvolt twin trace.jsonl --workers 8 --router least-loaded
  kvolt twin trace.jsonl --speed 2 --limit 500       twice the load, the first 500 requests
  kvolt twin trace.jsonl --rate 20                   the trace at 20 requests/s
  kvolt twin trace.jsonl --sla ttft=2s,itl=50ms      goodput and causes of SLA misses
  kvolt twin trace.jsonl --arg block_size=64 --arg kv_blocks=16384
  kvolt twin trace.jsonl --out today                 write report.json, report.html, requests.csv
  kvolt twin sweep trace.jsonl --axis workers=2,4,8  compare many clusters

Ctrl-C stops the run and reports what is done; a second Ctrl-C exits at once.

Exit code: 0; 1 if no request succeeded; 130 if interrupted.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
    group = parser.add_argument_group("results")
    option(group, "--out", "DIR", f"Write {WRITTEN} to this directory.")
    switch(group, "--force", "Overwrite an existing report.")
    switch(group, "--json", "Print the report as JSON.")
    switch(group, "--quiet", "Show no progress.")


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
            started_at=0.0,  # virtual time: the report depends only on its arguments
            settings=report_settings(args, settings),
            is_interrupted=twin.is_interrupted,
            open_loop=True,
        ),
        twin,
    )
    return output_report(report, twin_page(report), lambda: print_twin(report), folder, args.json)
