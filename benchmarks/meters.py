"""CPU and memory of process trees, and what other processes take from the machine."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
import psutil
from benchmarks.harness import BrokenRun


class Meter:
    """CPU and memory of processes, their threads and their children, since they started."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]

    def cpu_s(self) -> float:
        """User and system time, of children that have ended as well."""
        return sum(sum(process.cpu_times()[:4]) for process in self._family())

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def _family(self) -> list[psutil.Process]:
        try:
            return [each for root in self._roots for each in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise BrokenRun(f"process {error.pid} has ended") from None


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the machine during a run, in cores."""

    wall_s: float
    own_cores: float
    """Used by the benchmark's processes."""
    other_cores: float
    stolen_cores: float
    """Taken by the host of a virtual machine."""


class NoiseMeter:
    """CPU of a family of processes (default: this one's) and of all others, since its creation."""

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._start = time.perf_counter()
        self._own_s, (self._busy_s, self._stolen_s) = self._family_s(), _machine_s()

    def notes(self) -> Notes:
        wall_s = time.perf_counter() - self._start
        own_s, (busy_s, stolen_s) = self._family_s(), _machine_s()
        own = (own_s - self._own_s) / wall_s
        return Notes(
            wall_s=round(wall_s, 1),
            own_cores=round(own, 3),
            other_cores=round(max(0.0, (busy_s - self._busy_s) / wall_s - own), 3),
            stolen_cores=round((stolen_s - self._stolen_s) / wall_s, 3),
        )

    def _family_s(self) -> float:
        """Including processes that have ended."""
        family = (self._root, *self._root.children(recursive=True))
        return float(sum(sum(each.cpu_times()[:4]) for each in family))


def _machine_s() -> tuple[float, float]:
    """CPU seconds of the machine, and those stolen."""
    times = psutil.cpu_times()
    stolen = float(getattr(times, "steal", 0.0))
    # Guests' time is part of the user time as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - guests) - stolen, stolen
