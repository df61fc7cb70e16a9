"""Canned server under test by the load generators."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from benchmarks.processes import Processes, clean_environ, free_port


class Asked(msgspec.Struct, frozen=True):
    """Counts of a canned server since the last request for them."""

    began_s: float
    """Time of its first request."""
    peak: int
    """Most streams at one time."""


@contextmanager
def serve_canned(period_s: float, cores: set[int] | None = None) -> Iterator[int]:
    """Port of a canned server, on the given cores only."""
    with Processes("canned") as processes:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.load.canned", str(port), f"{period_s * 1e3:g}"]
        process = processes.start("canned", command, clean_environ())
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)

        def answers() -> bool:
            try:
                asked_of(port)
            except OSError:
                return False
            return True

        processes.wait_for(answers, "answer")
        yield port


def asked_of(port: int) -> Asked:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/asked", timeout=30) as response:
        return msgspec.json.decode(response.read(), type=Asked)
