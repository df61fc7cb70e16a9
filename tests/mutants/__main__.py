"""Mutation test of the fault simulator: every known defect must be found by a seeded cluster.

python -m tests.mutants                         all mutations, as many at a time as there are cores
python -m tests.mutants --only "leases"         those whose name contains this
python -m tests.mutants --seeds 100             more seeds before a mutation counts as survived

Each mutation is applied to a copy of the package; the working tree is never changed. Exits with 1 when a mutation
survives or no longer applies to the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutations import MUTATIONS, Mutation

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "kvolt"
_SEEDS = 64
_PATIENCE_S = 900.0
"""For one mutation, on a busy machine; one that hangs a run is found by that, too."""


class Verdict(NamedTuple):
    is_killed: bool
    what: str


def apply(mutation: Mutation, package: Path) -> str:
    """The mutated source of its file. ValueError when it does not apply."""
    text = (package / mutation.path).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.path}: the text to replace occurs {text.count(mutation.old)} times, not once"
        )
    return text.replace(mutation.old, mutation.new)


def copy_mutated(mutation: Mutation, folder: Path) -> None:
    """The package below `folder`, with the one file that differs."""
    text = apply(mutation, PACKAGE)
    shutil.copytree(PACKAGE, folder / "kvolt")  # with what was compiled: times are kept
    (folder / "kvolt" / mutation.path).write_text(text)


def judge(mutation: Mutation, num_seeds: int) -> Verdict:
    try:
        with tempfile.TemporaryDirectory(prefix="kvolt-mutant-") as folder:
            copy_mutated(mutation, Path(folder))
            for first, count in ((mutation.seed, 1), (0, num_seeds)):
                verdict = _run_seeds(Path(folder), first, count)
                if verdict.is_killed:
                    break
            return verdict
    except (OSError, ValueError) as error:
        return Verdict(False, f"does not apply: {error}")


def _run_seeds(folder: Path, first: int, count: int) -> Verdict:
    """Until a seed fails. A run that dies before any seed is no verdict."""
    command = [sys.executable, "-m", "kvolt.testing.cluster.faults", "--digests", "--until-bad"]
    command += ["--first", str(first), "--seeds", str(count)]
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "1"}
    try:
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, f"seeds from {first} on hang")
    lines = done.stdout.splitlines()
    if lines and "FAILED" in lines[-1]:
        seed, _, what = lines[-1].partition(" FAILED ")
        return Verdict(True, f"seed {seed}: {what}")
    if done.returncode:
        return Verdict(False, f"the run died: {done.stderr.strip().splitlines()[-1:]}")
    return Verdict(False, f"survived {count} seeds")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose name contains this")
    parser.add_argument("--seeds", type=int, default=_SEEDS, help=f"tried for each (default {_SEEDS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time (default: cores)")
    args = parser.parse_args(argv)
    chosen = [each for each in MUTATIONS if args.only in each.name]
    if not chosen:
        parser.error(f"no mutation has {args.only!r} in its name")
    began_at = time.monotonic()
    num_bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        judging = {pool.submit(judge, each, args.seeds): each for each in chosen}
        for number, done in enumerate(as_completed(judging), 1):
            mutation, verdict = judging[done], done.result()
            num_bad += not verdict.is_killed
            word = "killed  " if verdict.is_killed else "SURVIVED"
            print(f"{number}/{len(chosen)} {word} {mutation.name}: {verdict.what[:160]}", flush=True)
    print(f"{len(chosen)} mutations, {num_bad} survived; {time.monotonic() - began_at:.0f} s")
    return 1 if num_bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
