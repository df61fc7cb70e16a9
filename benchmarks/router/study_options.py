"""What a long study of the twin is started with."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.router.kept_rows import default_folder


def study_parser(name: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """`quick`: what `--quick` leaves of the study."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{quick}; nothing is kept")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="rows of a study that is not over"
    )
    return parser
