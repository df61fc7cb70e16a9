"""Runs a command and measures it with all its descendants, including those that outlive their parents.

usage: python -m benchmarks.load.metered RESULT.json COMMAND...

It is the parent of such orphans (Linux: PR_SET_CHILD_SUBREAPER), and exits when all have exited. Its own use is not
counted. It samples the use ten times a second, so that what was used before the work started can be left out.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
from benchmarks.harness import BrokenRun
from benchmarks.processes import clean_environ

_SUBREAPER = 36
_LOOK_S = 0.1
_TIMEOUT_S = 300.0
_TAIL_CHARACTERS = 2000


class Usage(msgspec.Struct, frozen=True):
    """Resource use of a command and its descendants."""

    status: int
    cpu_s: float
    wall_s: float
    """Until the command itself ended."""
    peak_rss_bytes: int
    """Peak resident set of the largest process."""
    looks: list[tuple[float, float]] = []
    """Times of this machine's monotonic clock, and the CPU seconds used until then."""

    def cpu_s_from(self, began_s: float) -> float:
        """CPU time used after this time."""
        times = [at_s for at_s, _ in self.looks]
        after = bisect.bisect(times, began_s)
        if not 0 < after < len(times):
            raise ValueError(f"nothing was looked at around {began_s}")
        (left_s, least), (right_s, most) = self.looks[after - 1 : after + 1]
        before = least + (most - least) * (began_s - left_s) / (right_s - left_s)
        return self.cpu_s - before


def run_metered(
    name: str, command: Sequence[str], folder: Path, cores: str | None = None, **environ: str
) -> tuple[Usage, bytes]:
    """Usage and standard output of a command on the named cores; BrokenRun with its last output if it fails."""
    pinned = ("taskset", "-c", cores) if cores is not None else ()
    usage = folder / "usage.json"
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load.metered", str(usage), *pinned, *command],
            env=clean_environ(**environ),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BrokenRun(f"{name} did not end in {_TIMEOUT_S:g} s:\n{_tail(folder)}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    used = msgspec.json.decode(usage.read_bytes(), type=Usage) if usage.exists() else None
    if used is None or used.status:
        raise BrokenRun(f"{name} failed:\n{_tail(folder)}")
    return used, (folder / "stdout").read_bytes()


def _tail(folder: Path) -> str:
    parts = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return "\n".join(part[-_TAIL_CHARACTERS:] for part in parts)


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
    """CPU time of all descendants, running and reaped."""
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
