"""Output directory of a run: report.json, report.html, requests.csv."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvolt.bench.load.report import Report, encode_report
from kvolt.bench.load.sample import Rows
from kvolt.core.errors import ConfigError

WRITTEN = "report.json, report.html, requests.csv"


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


def write_report(folder: Path, report: Report, page: str) -> None:
    """Write report.json and report.html. ConfigError if that fails; the caller should print the report instead."""
    try:
        (folder / "report.json").write_bytes(encode_report(report))
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    return ConfigError(f"cannot write to {folder}: {reason}", key="out", remedy="choose another directory")
