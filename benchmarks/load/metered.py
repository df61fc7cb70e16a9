"""Runs a command and tells what it and all its descendants used, also of those that outlived their parents.

usage: python -m benchmarks.load.metered RESULT.json COMMAND...

It is the parent that such orphans get (Linux: PR_SET_CHILD_SUBREAPER), and ends when all have ended. What it uses
itself is not counted. It looks ten times a second how much was used so far: who knows when the work began can then
leave out what was used before.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import resource
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil

_SUBREAPER = 36
_LOOK_S = 0.1


class Usage(msgspec.Struct, frozen=True):
    """Of a command and its descendants."""

    status: int
    cpu_s: float
    wall_s: float
    """Until the command itself had ended."""
    peak_rss_bytes: int
    """Of the largest single process."""
    looks: list[tuple[float, float]] = []
    """Times of this machine's monotonic clock, and the CPU seconds used until then."""

    def cpu_s_from(self, began_s: float) -> float:
        """Of all CPU what was used after this time."""
        times = [at_s for at_s, _ in self.looks]
        after = bisect.bisect(times, began_s)
        if not 0 < after < len(times):
            raise ValueError(f"nothing was looked at around {began_s}")
        (left_s, least), (right_s, most) = self.looks[after - 1 : after + 1]
        before = least + (most - least) * (began_s - left_s) / (right_s - left_s)
        return self.cpu_s - before


def main() -> None:
    result, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    began_s = time.monotonic()
    child = os.posix_spawnp(command[0], command, os.environ)
    status, wall_s = 0, 0.0
    over = threading.Event()
    looks: list[tuple[float, float]] = []
    looking = threading.Thread(target=_look, args=(looks, over))
    looking.start()
    while True:
        try:
            ended, code = os.wait()
        except ChildProcessError:
            break
        if ended == child:
            status, wall_s = os.waitstatus_to_exitcode(code), time.monotonic() - began_s
    over.set()
    looking.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    looks.append((time.monotonic(), cpu_s))
    usage = Usage(status, cpu_s, wall_s, used.ru_maxrss * 1024, looks)
    Path(result).write_bytes(msgspec.json.encode(usage))


def _look(looks: list[tuple[float, float]], over: threading.Event) -> None:
    me = psutil.Process()
    while True:
        looks.append((time.monotonic(), _used_s(me)))
        if over.wait(_LOOK_S):
            return


def _used_s(me: psutil.Process) -> float:
    """By all below this process: those that live, with what they have buried, and those that we have."""
    buried = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = buried.ru_utime + buried.ru_stime
    for process in me.children(recursive=True):
        try:
            total_s += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total_s


if __name__ == "__main__":
    main()
