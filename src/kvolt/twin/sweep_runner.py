"""Runs the points of a sweep in processes of their own, as many at once as it is given.

Owns the processes: who is free gets the next point, who dies is replaced, and at the end, however it comes, none is
left. A point that fails is an answer; it must not end the others.
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
from kvolt.twin.axes import Setup
from kvolt.twin.objectives import Figures, figures_of
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.report import make_twin_report

_JOIN_S = 10.0

_encode = msgspec.msgpack.Encoder().encode
_decode_setup = msgspec.msgpack.Decoder(Setup).decode


class Common(msgspec.Struct, frozen=True):
    """What all points of a sweep share; each process is sent it once."""

    records: list[TraceRecord]
    sla: Sla | None


class Outcome(msgspec.Struct, frozen=True):
    """What came of the point at this place: its figures, or why there are none."""

    place: int
    figures: Figures | None = None
    error: str = ""


def solve(common: Common, setup: Setup) -> Figures:
    """One point, here and now."""
    run = TwinRun(setup.settings, new_tally(setup.settings, common.sla))
    run.run(scale_time(common.records, setup.arrivals))
    facts = RunFacts(
        url="twin",
        model=setup.settings.engine.preset,
        started_at=0.0,
        settings={},
        was_cut=False,
        open_loop=True,
    )
    return figures_of(make_twin_report(facts, run))


def run_points(common: Common, setups: Sequence[Setup], num_processes: int) -> Generator[Outcome, None, None]:
    """The outcomes as they come, in no certain order. Leaving early ends what is under way."""
    pool = _Pool(_encode(common), [(place, _encode(setup)) for place, setup in enumerate(setups)])
    try:
        for _ in range(min(num_processes, len(setups))):
            pool.start()
        while pool.is_busy:
            yield from pool.outcomes()
    finally:
        pool.close()


@dataclass(slots=True)
class _Helper:
    process: SpawnProcess
    connection: Connection[Any, Any]
    place: int = 0
    """Of the point that it works on."""


class _Pool:
    def __init__(self, common: bytes, jobs: list[tuple[int, bytes]]) -> None:
        self._common = common
        self._jobs = jobs[::-1]  # the next one is last
        self._helpers: dict[Connection[Any, Any], _Helper] = {}
        # A fork would inherit whatever threads there are.
        self._context = multiprocessing.get_context("spawn")

    @property
    def is_busy(self) -> bool:
        return bool(self._helpers)

    def start(self) -> None:
        """One more process, with the next point."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_help, args=(theirs, self._common), daemon=True)
        process.start()
        theirs.close()  # so that its end is the connection's
        helper = self._helpers[ours] = _Helper(process, ours)
        self._give(helper)

    def outcomes(self) -> Iterator[Outcome]:
        """Wait for one at least."""
        for ready in wait(list(self._helpers)):
            assert isinstance(ready, Connection)
            helper = self._helpers[ready]
            try:
                outcome: Outcome = ready.recv()
            except (EOFError, OSError):
                yield self._lost(helper)
                continue
            yield outcome
            if self._jobs:
                self._give(helper)
            else:
                self._dismiss(helper)

    def _lost(self, helper: _Helper) -> Outcome:
        del self._helpers[helper.connection]
        helper.connection.close()
        helper.process.join(_JOIN_S)
        if self._jobs:
            self.start()
        code = helper.process.exitcode
        return Outcome(helper.place, error=f"its process ended with {code}: was there too little memory?")

    def _give(self, helper: _Helper) -> None:
        """The next point. One that is dead by now is found out when its answer is waited for."""
        helper.place, setup = self._jobs.pop()
        with suppress(OSError):
            helper.connection.send((helper.place, setup))

    def _dismiss(self, helper: _Helper) -> None:
        """It ends by itself, since nobody sends any more."""
        del self._helpers[helper.connection]
        helper.connection.close()
        helper.process.join(_JOIN_S)

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.process.terminate()
        for helper in self._helpers.values():
            helper.process.join(_JOIN_S)
            if helper.process.is_alive():
                helper.process.kill()
            helper.connection.close()
        self._helpers.clear()


def _help(connection: Connection[Any, Any], encoded: bytes) -> None:
    """A process of the pool: one point after the other, until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started us, and that one ends us
    common = msgspec.msgpack.decode(encoded, type=Common)
    while True:
        try:
            place, setup = connection.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(place, solve(common, _decode_setup(setup)))
        except Exception as error:  # of this point; the next may do better
            outcome = Outcome(place, error=f"{type(error).__name__}: {error}")
        connection.send(outcome)
