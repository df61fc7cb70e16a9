"""Output of `kvolt bench`: live progress (plain lines without a terminal), the final tables, and report files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvolt.bench.load.compare import Change
from kvolt.bench.load.report import BenchReport, encode_report
from kvolt.bench.load.report_text import LATENCY_NAMES, change_rows, facts, latency_rows, milliseconds
from kvolt.bench.load.runner import LoadRun
from kvolt.bench.load.sample import Rows
from kvolt.bench.load.tally import Tally
from kvolt.cli.progress import show_live
from kvolt.core.errors import ConfigError

_LIVE_S = 1.0
"""Redrawing blocks the event loop for milliseconds, which would distort token times."""
WRITTEN = "report.json, report.html, requests.csv"


class BenchProgress:
    """Progress of a run, written to stderr; stdout is for results."""

    def __init__(self, run: LoadRun, tally: Tally) -> None:
        self._run = run
        self._tally = tally
        self._last_count = (0.0, 0)

    async def show(self) -> None:
        await show_live(self._line, self._picture, _LIVE_S)

    def _events_per_s(self) -> float:
        now_s, count = self._run.elapsed_s, self._tally.latencies["itl"].count
        last_s, last_count = self._last_count
        self._last_count = (now_s, count)
        return (count - last_count) / (now_s - last_s) if now_s > last_s else 0.0

    def _line(self) -> str:
        run, tally = self._run, self._tally
        ttft, itl = tally.latencies["ttft"], tally.latencies["itl"]
        share = run.share_done
        return (
            f"{run.elapsed_s:6.0f} s"
            + (f" {100 * share:3.0f} %" if share is not None else "")
            + f"  {tally.num_complete}"
            f" done, {tally.num_failed} failed, {run.num_in_flight} running, {self._events_per_s():.0f} tokens/s,"
            f" ttft p50 {milliseconds(ttft.percentile(50))} p99 {milliseconds(ttft.percentile(99))} ms,"
            f" itl p50 {milliseconds(itl.percentile(50))} p99 {milliseconds(itl.percentile(99))} ms"
        )

    def _picture(self) -> Group:
        run, tally = self._run, self._tally
        share = run.share_done
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=1.0, completed=share or 0.0, width=40, pulse=share is None),
            Text(
                f"{run.elapsed_s:.0f} s, {tally.num_complete} done, {tally.num_failed} failed,"
                f" {run.num_in_flight} running, {self._events_per_s():.0f} tokens/s   (Ctrl-C stops and reports)"
            ),
        )
        table = Table("ms", "p50", "p90", "p99", "max", box=None)
        for name, histogram in tally.latencies.items():
            values = (*histogram.percentiles((50.0, 90.0, 99.0)), histogram.max)
            table.add_row(LATENCY_NAMES[name], *(milliseconds(value) for value in values))
        return Group(bar, table)


def print_report(report: BenchReport) -> None:
    console = stdout_console()
    title = f"{report.model} at {report.url}" + ("  (interrupted)" if report.is_interrupted else "")
    console.print(Text(title, style="bold"))
    console.print(text_table([["", ""], *facts(report)], header=False))
    console.print()
    header, *rows = latency_rows(report)
    console.print(text_table([["ms", *header[1:]], *rows]))
    for kind, count in report.errors.items():
        console.print(Text(f"{count} x {kind}: {report.messages.get(kind, '')}", style="red"))
    for warning in report.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))


def print_changes(changes: list[Change], differing: dict[str, tuple[object, object]]) -> None:
    console = stdout_console()
    for name, (first, second) in differing.items():
        if first is not None and second is not None:
            console.print(Text(f"note: the runs differ in {name}: {first} and {second}", style="yellow"))
    for place, run in enumerate(("first", "second")):
        names = [f"{name}={values[place]}" for name, values in differing.items() if values[1 - place] is None]
        if names:
            console.print(Text(f"note: only the {run} run has {', '.join(names)}", style="yellow"))
    console.print(text_table(change_rows(changes)))


def stdout_console() -> Console:
    """Console with a wide fixed width if stdout is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def text_table(rows: Sequence[Sequence[str]], header: bool = True) -> Table:
    table = Table(box=None, show_header=header, pad_edge=False)
    for at, title in enumerate(rows[0]):
        table.add_column(title, justify="left" if at == 0 or not header else "right")
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))
    return table


def open_rows(folder: Path, force: bool, files: ExitStack) -> Rows:
    """Open requests.csv before the run, so that an unwritable directory fails early."""
    if not force and (folder / "report.json").exists():
        raise ConfigError(
            f"{folder} already contains a report", key="out", remedy="choose another directory or use --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Rows(files.enter_context((folder / "requests.csv").open("w", encoding="utf-8", newline="")))
    except OSError as error:
        raise unwritable(folder, error) from error


def _write_report(folder: Path, report: BenchReport, page: str) -> None:
    """Write report.json and report.html."""
    try:
        (folder / "report.json").write_bytes(encode_report(report))
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    return ConfigError(f"cannot write to {folder}: {reason}", key="out", remedy="choose another directory")


def output_report(
    report: BenchReport, page: str, show: Callable[[], None], folder: Path | None, as_json: bool
) -> int:
    """Write the report to `folder`, if any, and print it; return the exit code of the run."""
    if folder is not None:
        try:
            _write_report(folder, report, page)
        except ConfigError:
            show()
            raise
    if as_json:
        print(encode_report(report).decode(), end="")
    else:
        show()
        if folder is not None:
            print(f"written to {folder}: {WRITTEN}")
    return 130 if report.is_interrupted else 0 if report.counts.complete else 1
