"""A profile of kvolt's frontend over a measured window, as a table. The sampler in it is `profiled`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.frontend.client import Measured
from benchmarks.harness import BrokenRun, table

_NUM_FUNCTIONS = 30
_NUM_LINES = 15
_WAIT_S = 10.0


def profile_text(path: Path, load: Callable[[], Measured]) -> str:
    """What the load was, in which functions its time went, and in which lines.

    The path is where the frontend leaves its counts.
    """
    path.unlink(missing_ok=True)
    done = load()
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise BrokenRun("the frontend did not hand over its profile")
        time.sleep(0.05)
    found = json.loads(path.read_text())
    about = (
        f"{done.responses:,} answers, {done.events:,} events in {done.wall_s:.1f} s; "
        f"edge {done.edge_cpu_s:.2f} s of CPU; {found['num_samples']:,} samples"
    )
    return "\n".join([about, _functions(found), "", _lines(found)])


def _functions(found: dict[str, Any]) -> str:
    count = max(found["num_samples"], 1)
    own = sorted(found["own"].items(), key=lambda item: -item[1])[:_NUM_FUNCTIONS]
    body = [(_share(number, count), _share(found["total"][name], count), name) for name, number in own]
    return table(("own %", "total %", "function"), body)


def _lines(found: dict[str, Any]) -> str:
    count = max(found["num_samples"], 1)
    own = sorted(found["lines"].items(), key=lambda item: -item[1])[:_NUM_LINES]
    return table(("own %", "line"), [(_share(number, count), name) for name, number in own])


def _share(number: int, count: int) -> str:
    return f"{100 * number / count:5.1f}"
