"""The folder of a run's results: report.json, report.html, requests.csv."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from kvolt.bench.load.report import Report, encode_report
from kvolt.bench.load.rows import Rows
from kvolt.core.errors import ConfigError

WRITTEN = "report.json, report.html, requests.csv"


def open_rows(folder: Path, force: bool, files: ExitStack) -> Rows:
    """Made before the run, so that an hour's work is not lost to a folder that cannot be written."""
    if not force and (folder / "report.json").exists():
        raise ConfigError(
            f"{folder} holds a report already", key="out", remedy="name another folder, or give --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Rows(files.enter_context((folder / "requests.csv").open("w", encoding="utf-8", newline="")))
    except OSError as error:
        raise unwritable(folder, error) from error


def write_report(folder: Path, report: Report, page: str) -> None:
    """ConfigError when the folder cannot be written; whoever asked should print the report then."""
    try:
        (folder / "report.json").write_bytes(encode_report(report))
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    return ConfigError(f"cannot write to {folder}: {reason}", key="out", remedy="name another folder")
