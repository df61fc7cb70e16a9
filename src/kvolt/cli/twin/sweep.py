"""`kvolt twin sweep`: simulate many clusters on one trace and report the Pareto set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from kvolt.api.progress import progress
from kvolt.bench.load.sla import parse_sla
from kvolt.cli.bench.screen import stdout_console, text_table, unwritable
from kvolt.cli.flags import option, repeated, switch
from kvolt.cli.progress import ending
from kvolt.cli.twin.flags import add_cluster, records_of, report_settings, settings_of
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.host.cores import usable_cores
from kvolt.twin.axes import Point, PointSetup, check_axes, parse_axis, points_of, setup_of
from kvolt.twin.objectives import check_objectives, default_objectives
from kvolt.twin.points import PointResult, PointsFile, point_digest, trace_digest
from kvolt.twin.sweep_report import SweepReport, csv_text, pareto_digests, point_rows, sweep_page
from kvolt.twin.sweep_runner import Common, run_points

HELP = """
Simulate every combination of the axes on a trace (see `kvolt twin`), several at once, and print the Pareto set of the
objectives.

An axis is workers, prefill, gpus, router, link_s, seed, arrivals (speed-up of arrivals), a router setting
(router.temperature, router.overlap_weight ...) or an argument of the sim engine (`kvolt engine list sim`).

Examples:
  kvolt twin sweep trace.jsonl --axis workers=2,4,8,16 --axis router=round-robin,least-loaded --out sweep
  kvolt twin sweep trace.jsonl --axis workers=4,8 --axis kv_blocks=4096,16384 --sla ttft=2s,itl=50ms
  kvolt twin sweep trace.jsonl --axis workers=8 --axis arrivals=1,2,4 --objective ttft_p99 --objective gpu_seconds
  kvolt twin sweep trace.jsonl --axes axes.json --sample 100    100 random points

With --out each point is saved when it is done; a sweep with the same directory resumes, also with other axes. Ctrl-C
shows the results so far.

Default objectives: good_share (of all requests) and gpu_seconds with --sla, else ttft_p90, itl_p90 and gpu_seconds.
Exit code: 0; 1 if a point failed; 130 if interrupted.
"""

_WRITTEN = "points.jsonl, sweep.json, sweep.csv, sweep.html"


def configure(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser)
    group = parser.add_argument_group("sweep")
    repeated(group, "--axis", "NAME=V1,V2,...", "Axis and its values.")
    option(group, "--axes", "FILE", 'JSON file with axes: {"workers": [2, 4], ...}.')
    option(group, "--sample", "N", "Simulate N random points only, drawn with --seed.", int)
    repeated(group, "--objective", "METRIC", "Metric to optimize.")
    group = parser.add_argument_group("results")
    option(group, "--processes", "N", "Number of parallel processes. Default: one per core.", int)
    option(group, "--out", "DIR", f"Write {_WRITTEN} to this directory.")
    switch(group, "--json", "Print all points as JSON.")
    switch(group, "--quiet", "Show no progress.")


@dataclass(frozen=True, slots=True)
class _Plan:
    """The validated sweep, built before the first simulation."""

    axes: dict[str, list[Any]]
    points: list[Point]
    setups: list[PointSetup]
    digests: list[str]
    common: Common
    objectives: list[str]
    num_processes: int


def run(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    plan = _plan(args)
    folder = Path(args.out) if args.out else None
    with ExitStack() as files:
        file = files.enter_context(closing(_open(folder))) if folder is not None else None
        previous = file.read() if file is not None else {}
        points = dict(zip(plan.digests, plan.points, strict=True))
        results = {
            digest: msgspec.structs.replace(previous[digest], point=point)
            for digest, point in points.items()
            if digest in previous
        }
        is_interrupted, num_failed = _run(
            plan, results, file.append if file is not None else lambda result: None, args.quiet
        )
    completed = [results[digest] for digest in points if digest in results]
    report = SweepReport(
        settings=report_settings(args, settings_of(args)),
        axes=plan.axes,
        objectives=plan.objectives,
        num_points=len(points),
        points=completed,
        pareto=pareto_digests(completed, plan.objectives),
        sla=plan.common.sla.limits if plan.common.sla is not None else None,
    )
    _output(report, folder, args.json)
    if is_interrupted:
        return 130
    return 1 if num_failed else 0


def _plan(args: argparse.Namespace) -> _Plan:
    for name in ("sample", "processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}", key=name, remedy="must be 1 or more")
    axes = _axes(args)
    check_axes(axes, args.sample)
    sla = parse_sla(args.sla) if args.sla else None
    objectives = list(dict.fromkeys(args.objective)) or default_objectives(sla is not None)
    check_objectives(objectives, sla is not None)
    base = PointSetup(settings=settings_of(args))
    points = points_of(axes, args.sample, args.seed)
    setups = [setup_of(base, point) for point in points]
    records = records_of(args)
    trace = trace_digest(records)
    return _Plan(
        axes=axes,
        points=points,
        setups=setups,
        digests=[point_digest(setup, trace, sla) for setup in setups],
        common=Common(records, sla),
        objectives=objectives,
        num_processes=args.processes or len(usable_cores()),
    )


def _axes(args: argparse.Namespace) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    if args.axes is not None:
        try:
            axes = msgspec.json.decode(Path(args.axes).read_bytes(), type=dict[str, list[Any]])
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"cannot read {args.axes}: {reason}", key="axes", remedy="name a file"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{args.axes}: invalid axes: {error}", key="axes", remedy='write {"workers": [2, 4]}'
            ) from error
    for text in args.axis:
        name, values = parse_axis(text)
        axes[name] = values
    # Duplicate values would be duplicate points.
    return {
        name: [value for at, value in enumerate(values) if value not in values[:at]]
        for name, values in axes.items()
    }


def _open(folder: Path) -> PointsFile:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return PointsFile(folder / "points.jsonl")
    except OSError as error:
        raise unwritable(folder, error) from error


def _interrupt() -> None:
    raise KeyboardInterrupt


def _run(
    plan: _Plan,
    results: dict[str, PointResult],
    save: Callable[[PointResult], None],
    quiet: bool,
) -> tuple[bool, int]:
    """Simulate the missing points into `results`. Returns whether it was interrupted, and the number of failures."""
    missing = [place for place, digest in enumerate(plan.digests) if digest not in results]
    setups = [plan.setups[place] for place in missing]
    num_failed = 0
    with progress("clusters", len(plan.points), quiet, len(plan.points) - len(missing)) as step:
        try:
            with ending(_interrupt), closing(run_points(plan.common, setups, plan.num_processes)) as outcomes:
                for outcome in outcomes:
                    place = missing[outcome.place]
                    point = plan.points[place]
                    step()
                    if outcome.stats is None:
                        num_failed += 1
                        label = ", ".join(f"{name}={value}" for name, value in point.items())
                        print(f"kvolt: {label}: {outcome.error}", file=sys.stderr)
                        continue
                    result = PointResult(digest=plan.digests[place], point=point, figures=outcome.stats)
                    results[result.digest] = result
                    save(result)
        except KeyboardInterrupt:
            return True, num_failed
    return False, num_failed


def _output(report: SweepReport, folder: Path | None, as_json: bool) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if folder is not None:
        try:
            (folder / "sweep.json").write_bytes(encoded)
            (folder / "sweep.csv").write_text(csv_text(report), encoding="utf-8")
            (folder / "sweep.html").write_text(sweep_page(report), encoding="utf-8")
        except OSError as error:
            raise unwritable(folder, error) from error
    if as_json:
        print(encoded.decode(), end="")
        return
    console = stdout_console()
    rows = point_rows(report, only_best=True)
    known = f"{len(report.points)} of {report.num_points} clusters"
    console.print(
        Text(f"{known}; Pareto set for {', '.join(report.objectives)}: {len(rows) - 1}", style="bold")
    )
    console.print(text_table([row[1:] for row in rows]))
    if folder is not None:
        print(f"written to {folder}: {_WRITTEN}")
