"""Shared by all benchmarks: command line, interleaved rounds, statistics, tables and result files.

Every benchmark builds its parser with `parser_for`, which adds `--smoke` and `--out`, and starts with `run`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import math
import multiprocessing
import os
import platform
import shlex
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec

ROOT = Path(__file__).resolve().parents[1]

_VERSIONS = ("kvolt", "uvloop", "msgspec", "httptools", "tokenizers", "torch", "grpcio")
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t, two-sided, by degrees of freedom from 1 on."""
_NORMAL = 1.96

Job = TypeVar("Job")
Result = TypeVar("Result")
Item = TypeVar("Item")
Row = TypeVar("Row")


class BrokenRun(Exception):
    """A run without a result: a process failed, or its output is wrong."""


class Missing(BrokenRun):
    """Something that the machine lacks, as a noun phrase: a device, a package, a program."""


# --- command line


def parser_for(
    file: str,
    doc: str | None,
    *,
    results: str | None = "",
    smoke: str = "the same code on the smallest size, once; writes no result file",
    peer: str = "",
) -> argparse.ArgumentParser:
    """Parser of a benchmark module, given its `__file__` and `__doc__`.

    `results` names the default result files below the module's `results` folder (default: the module's
    name); None: nothing is written without `--out`. `peer` adds `--peer-dir`.
    """
    path = Path(file).resolve()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = None if results is None else path.parent / "results" / (results or path.stem)
    where = f"default: {default.relative_to(ROOT)}" if default else "default: not written"
    parser.add_argument("--smoke", action="store_true", help=smoke)
    parser.add_argument("--out", type=Path, help=f"write PATH.json and PATH.txt ({where})")
    if peer:
        parser.add_argument(
            "--peer-dir",
            type=Path,
            default=peer_folder(),
            help=f"folder of {peer}, installed at the first run",
        )
    parser.set_defaults(module=module, results=default, load_1min=os.getloadavg()[0])
    return parser


def peer_folder() -> Path:
    named = os.environ.get("KVOLT_PEER")
    return Path(named) if named else Path.home() / ".cache" / "kvolt-peer"


def peer_unless_smoke(options: argparse.Namespace, find: Callable[..., Item]) -> Item | None:
    """Result of `find` for the peer's folder; None in a smoke run without the peer."""
    try:
        return find(options.peer_dir, may_install=not options.smoke)
    except Missing:
        if not options.smoke:
            raise
        return None


def names(text: str) -> tuple[str, ...]:
    """Argument type: names separated by commas."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Argument type: integers separated by commas."""
    return tuple(int(part) for part in text.split(","))


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a benchmark and exit with its status.

    A missing device, package or program ends a smoke run with status 0 and one line, any other run with 1.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends child processes as well
    os.environ["PYTHONPATH"] = python_path()
    try:
        sys.exit(main())
    except Missing as error:
        if "--smoke" in sys.argv:
            print(f"skipped: needs {error}")
            sys.exit(0)
        sys.exit(f"no result: needs {error}")
    except BrokenRun as error:
        sys.exit(f"no result: {error}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def python_path() -> str:
    """PYTHONPATH for child processes, which run in other folders: absolute, with this repository first."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(ROOT), *(os.path.abspath(part) for part in parts if part)]))


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


# --- rounds


def in_turn(systems: Sequence[Item], number: int) -> Sequence[Item]:
    """Systems in the order of round `number`: reversed in every second one."""
    return systems if number % 2 else systems[::-1]


def in_processes(
    work: Callable[[Job], Result], jobs: Sequence[Job], num_processes: int
) -> Iterator[tuple[Job, Result]]:
    """Jobs with their results as they complete; by one process: in this one. Ctrl-C cancels the jobs that are left."""
    if num_processes == 1:
        yield from ((job, work(job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(num_processes, len(jobs))), context) as pool:
        try:
            running = {pool.submit(work, job): job for job in jobs}
            for done in as_completed(running):
                yield running[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# --- statistics


class Spread(msgspec.Struct, frozen=True):
    """Median and range over rounds."""

    median: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        return f"{self.median:{form}} ({self.low:{form}}..{self.high:{form}})"


class Interval(msgspec.Struct, frozen=True):
    """Mean over seeds with its 95 % confidence bound."""

    mean: float
    half: float

    def text(self, form: str = ".2f") -> str:
        return f"{self.mean:{form}} ± {self.half:{form}}"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def median_bound(values: Sequence[float]) -> float | None:
    """Upper 95 % bound of the median, without an assumption about the distribution; None: too few values.

    The smallest value that is below the median with a probability of at most 5 %, as in a sign test.
    """
    count = len(values)
    for rank, value in enumerate(sorted(values), 1):
        if sum(math.comb(count, above) for above in range(rank, count + 1)) <= 0.05 * 2**count:
            return value
    return None


def interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean."""
    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return Interval(mean, 0.0)
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL
    return Interval(mean, quantile * statistics.stdev(values) / len(values) ** 0.5)


# --- rows to tables


class Figure(NamedTuple):
    """A column (or line) of a table: title, value of a row, format, and what rounds are folded to."""

    title: str
    of: str | Callable[[Any], Any]
    """Field or function of a row."""
    form: str = ".2f"
    fold: Callable[[Sequence[Any]], Any] = spread

    def value(self, row: object) -> Any:
        return attrgetter(self.of)(row) if isinstance(self.of, str) else self.of(row)


class Rows(Generic[Row]):
    """Rows of several rounds or seeds, selected and compared round by round."""

    def __init__(self, rows: Sequence[Row], by: str = "round") -> None:
        self.rows, self._by = rows, by

    def __bool__(self) -> bool:
        return bool(self.rows)

    def where(self, **fields: object) -> Rows[Row]:
        return self.only(lambda row: all(getattr(row, name) == value for name, value in fields.items()))

    def only(self, is_meant: Callable[[Row], bool]) -> Rows[Row]:
        return Rows([row for row in self.rows if is_meant(row)], self._by)

    def each(self, *fields: str) -> Iterator[tuple[Any, Rows[Row]]]:
        """Values of the fields (of one: the value itself) with their rows, in order of appearance."""
        groups: dict[Any, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(attrgetter(*fields)(row), []).append(row)
        for key, group in groups.items():
            yield key, Rows(group, self._by)

    def values(self, figure: Figure) -> dict[Any, Any]:
        """By round."""
        return {attrgetter(self._by)(row): figure.value(row) for row in self.rows}

    def fold(self, figure: Figure) -> Any:
        """Over all rounds; None without rows."""
        return figure.fold([figure.value(row) for row in self.rows]) if self.rows else None

    def cells(self, figures: Sequence[Figure]) -> list[str]:
        return [cell(self.fold(figure), figure.form) for figure in figures]

    def over(self, other: Rows[Row], figure: Figure, theirs: Figure | None = None) -> Spread | None:
        """Ratio to others (to another figure of theirs) within each round; None where no round has both."""
        pairs = self.pairs(other, figure, theirs)
        return spread([mine / peer for mine, peer in pairs]) if pairs else None

    def pairs(self, other: Rows[Row], figure: Figure, theirs: Figure | None = None) -> list[tuple[Any, Any]]:
        """The figure here and there, of each round that has both."""
        peers = other.values(theirs or figure)
        return [(value, peers[number]) for number, value in self.values(figure).items() if number in peers]

    def ratio(self, other: Rows[Row], figure: Figure) -> Interval:
        """Mean ratio to others, round by round; of the means where a round of theirs has nothing."""
        mine, theirs = self.values(figure), other.values(figure)
        if min(theirs.values()) > 0:
            return interval([value / theirs[number] for number, value in sorted(mine.items())])
        total = sum(theirs.values())
        return Interval(sum(mine.values()) / total if total else float("inf"), 0.0)


def cell(value: Any, form: str = "") -> str:
    """A value in a table: "-" for None."""
    if isinstance(value, Spread | Interval):
        return value.text(form or ".2f")
    if value is None or isinstance(value, str):
        return value or "-"
    return format(value, form)


def table(head: str | Sequence[str], body: Sequence[Sequence[object]]) -> str:
    """Aligned columns; `head` may be one text with ` | ` between the columns."""
    head = head.split(" | ") if isinstance(head, str) else head
    texts = [[each if isinstance(each, str) else cell(each) for each in row] for row in body]
    widths = [max(len(row[at]) for row in (head, *texts)) for at in range(len(head))]
    rows = [head, ["-" * width for width in widths], *texts]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def row_table(figures: Sequence[Figure], rows: Sequence[object]) -> str:
    """A line for each row."""
    body = [[cell(each.value(row), each.form) for each in figures] for row in rows]
    return table([each.title for each in figures], body)


def comparison(
    title: str, figures: Sequence[Figure], sides: Mapping[str, Rows[Any]], ours: str, theirs: str
) -> str:
    """A line for each figure, a column for each side, and the ratio of `ours` to `theirs` where both ran."""
    both = ours in sides and theirs in sides
    body = [
        (
            figure.title,
            *(side.cells([figure])[0] for side in sides.values()),
            *([sides[ours].over(sides[theirs], figure)] if both else []),
        )
        for figure in figures
    ]
    return table((title, *sides, *([f"{ours} / {theirs}"] if both else [])), body)


def goal(text: str, met: bool, value: object) -> str:
    return f"goal {'met   ' if met else 'missed'}  {text}: {cell(value)}"


# --- results


def report(options: argparse.Namespace, text: str, results: Mapping[str, object]) -> None:
    """Print a report and write it, with command, machine facts and all rows, unless this is a smoke run."""
    print(text, flush=True)
    out = options.out or (None if options.smoke else options.results)
    if out is None:
        return
    whole = {
        "command": shlex.join(["python", "-m", options.module, *sys.argv[1:]]),
        "machine": {**machine(), "load_1min": round(options.load_1min, 2)},
        "load_1min_after": round(os.getloadavg()[0], 2),
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    out.with_suffix(".txt").write_text(text + "\n")


def machine() -> dict[str, object]:
    """Facts that are needed to compare results; none identifies the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: installed for name in _VERSIONS if (installed := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
