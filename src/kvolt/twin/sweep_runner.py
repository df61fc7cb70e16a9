"""Runner of a sweep's points in a pool of processes.

A free process gets the next point, a dead process is replaced, and all processes end with the run. A failed point does
not affect the others.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from kvolt.bench.load.report import RunFacts
from kvolt.bench.load.sla import Sla
from kvolt.bench.traces import scale_time
from kvolt.core.trace import TraceRecord
from kvolt.twin.axes import PointSetup
from kvolt.twin.objectives import PointStats, stats_of
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import make_twin_report

_JOIN_S = 10.0

_encode = msgspec.msgpack.Encoder().encode
_decode_setup = msgspec.msgpack.Decoder(PointSetup).decode


class Common(msgspec.Struct, frozen=True):
    """Settings common to all points; sent to each process once."""

    records: list[TraceRecord]
    sla: Sla | None


class PointOutcome(msgspec.Struct, frozen=True):
    """Results of a point, or the error."""

    place: int
    stats: PointStats | None = None
    error: str = ""


def solve(common: Common, setup: PointSetup) -> PointStats:
    """Run one point in this process."""
    run = TwinRun(setup.settings, new_tally(setup.settings, common.sla))
    run.run(scale_time(common.records, setup.arrivals))
    facts = RunFacts(
        url="twin",
        model=setup.settings.engine.preset,
        started_at=0.0,
        settings={},
        is_interrupted=False,
        open_loop=True,
    )
    return stats_of(make_twin_report(facts, run))


def run_points(
    common: Common, setups: Sequence[PointSetup], num_processes: int
) -> Generator[PointOutcome, None, None]:
    """Yield outcomes in order of completion. Closing the generator ends running points."""
    pool = _Pool(_encode(common), [(place, _encode(setup)) for place, setup in enumerate(setups)])
    try:
        for _ in range(min(num_processes, len(setups))):
            pool.start()
        while pool.is_busy:
            yield from pool.outcomes()
    finally:
        pool.close()


@dataclass(slots=True)
class _PoolProcess:
    process: SpawnProcess
    connection: Connection[Any, Any]
    place: int = 0
    """Index of its current point."""


class _Pool:
    def __init__(self, common: bytes, jobs: list[tuple[int, bytes]]) -> None:
        self._common = common
        self._jobs = jobs[::-1]  # the next one is last
        self._processes: dict[Connection[Any, Any], _PoolProcess] = {}
        # A fork would inherit the state of threads.
        self._context = multiprocessing.get_context("spawn")

    @property
    def is_busy(self) -> bool:
        return bool(self._processes)

    def start(self) -> None:
        """Start a process with the next point."""
        parent_end, child_end = self._context.Pipe()
        process = self._context.Process(target=_run_assigned, args=(child_end, self._common), daemon=True)
        process.start()
        child_end.close()  # so that the connection ends with the process
        member = self._processes[parent_end] = _PoolProcess(process, parent_end)
        self._assign(member)

    def outcomes(self) -> Iterator[PointOutcome]:
        """Wait for at least one outcome."""
        for ready in wait(list(self._processes)):
            assert isinstance(ready, Connection)
            member = self._processes[ready]
            try:
                outcome: PointOutcome = ready.recv()
            except (EOFError, OSError):
                yield self._lost(member)
                continue
            yield outcome
            if self._jobs:
                self._assign(member)
            else:
                self._stop(member)

    def _lost(self, member: _PoolProcess) -> PointOutcome:
        del self._processes[member.connection]
        member.connection.close()
        member.process.join(_JOIN_S)
        if self._jobs:
            self.start()
        code = member.process.exitcode
        return PointOutcome(member.place, error=f"the process exited with code {code} (out of memory?)")

    def _assign(self, member: _PoolProcess) -> None:
        """Send the next point. A dead process is detected when its result is awaited."""
        member.place, setup = self._jobs.pop()
        with suppress(OSError):
            member.connection.send((member.place, setup))

    def _stop(self, member: _PoolProcess) -> None:
        """Close the connection, which ends the process."""
        del self._processes[member.connection]
        member.connection.close()
        member.process.join(_JOIN_S)

    def close(self) -> None:
        for member in self._processes.values():
            member.process.terminate()
        for member in self._processes.values():
            member.process.join(_JOIN_S)
            if member.process.is_alive():
                member.process.kill()
            member.connection.close()
        self._processes.clear()


def _run_assigned(connection: Connection[Any, Any], encoded: bytes) -> None:
    """Main loop of a pool process: run points until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent, which ends this process
    common = msgspec.msgpack.decode(encoded, type=Common)
    while True:
        try:
            place, setup = connection.recv()
        except EOFError:
            return
        try:
            outcome = PointOutcome(place, solve(common, _decode_setup(setup)))
        except Exception as error:  # affects this point only
            outcome = PointOutcome(place, error=f"{type(error).__name__}: {error}")
        connection.send(outcome)
