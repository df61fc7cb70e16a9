"""`kvolt trace record`: record the requests of running frontends into one trace.

Each frontend streams its requests with times relative to its own start; the recorder aligns the starts, so that several
frontend processes give one trace.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.text import Text

from kvolt.api.cluster import Cluster, visit
from kvolt.bench.load.sla import parse_duration_s
from kvolt.bench.traces.writing import UnsortedTrace
from kvolt.cli.frontends import find_frontends
from kvolt.cli.process import run_loop
from kvolt.cli.progress import run_until_signal, show_live
from kvolt.core.endpoints import Instance
from kvolt.core.errors import ConfigError, KvoltError, NotFound, Unavailable
from kvolt.frontend.admin.trace_recorder import MAX_DURATION_S, TRACE_ENDPOINT, RecordedPart, RecordTrace
from kvolt.runtime.clock import Clock, SystemClock
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.tasks import Scope

_KEY_BYTES = 32
_SILENCE_S = 10.0
"""Maximum silence of a frontend, which sends four parts per second."""
_LIMITS = Deadlines(connect_s=5.0, first_s=5.0, between_s=_SILENCE_S, total_s=MAX_DURATION_S + 24 * 3600.0)
_LIVE_S = 0.5

_NOTHING = RecordedPart()
_decode_part = msgspec.msgpack.Decoder(RecordedPart).decode


@dataclass(slots=True)
class _Source:
    """A frontend with the counts of its latest part."""

    instance: Instance
    started_at: float | None = None
    latest: RecordedPart = _NOTHING
    failure: KvoltError | None = None


class RecordingRun:
    """Reads from all frontends until they end or `end` is called."""

    def __init__(
        self, cluster: Cluster, clock: Clock, file: UnsortedTrace, frontends: Sequence[Instance]
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._file = file
        self.sources = [_Source(instance) for instance in frontends]
        self._started_at: float | None = None
        self._scope: Scope | None = None

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._started_at is None else self._clock.monotonic() - self._started_at

    def total(self, name: str) -> int:
        """Sum of a count of RecordedPart over all frontends."""
        return sum(getattr(source.latest, name) for source in self.sources)

    async def run(self, request: RecordTrace) -> None:
        async with Scope("record") as self._scope:
            for source in self.sources:
                self._scope.start(self._read(source, request), source.instance.process)

    def end(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _read(self, source: _Source, request: RecordTrace) -> None:
        to = Destination(source.instance.address, TRACE_ENDPOINT)
        try:
            async with await self._cluster.open(to, request, _LIMITS, _decode_part) as stream:
                async for part in stream:
                    self._add_part(source, part)
        except KvoltError as error:
            source.failure = error

    def _add_part(self, source: _Source, part: RecordedPart) -> None:
        now = self._clock.monotonic()
        if self._started_at is None:
            self._started_at = now
        if source.started_at is None:
            source.started_at = now
        offset_ms = (source.started_at - self._started_at) * 1e3
        for record in part.records:
            self._file.add(replace(record, timestamp=record.timestamp + offset_ms))
        if part.records:
            self._file.flush()
        source.latest = replace(part, records=())

    def line(self) -> str:
        return (
            f"{self.elapsed_s:6.0f} s  {self._file.num_records} requests, {self.total('running')} running, "
            f"{self.total('dropped')} dropped"
        )

    def picture(self) -> Text:
        return Text(f"{self.line()}   (Ctrl-C stops and writes the trace)")


def record(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    duration_s = _duration_s(args.duration)
    path = Path(args.out)
    if path.exists() and not args.force:
        raise ConfigError(f"{path} exists", key="out", remedy="choose another file or use --force")
    request = RecordTrace(key=secrets.token_bytes(_KEY_BYTES), duration_s=duration_s, model=args.model)
    file = UnsortedTrace(path, replace_left=args.force)

    async def main() -> int:
        async with visit(loaded.settings) as cluster:
            frontends = await find_frontends(cluster, loaded.settings, args.url)
            run = RecordingRun(cluster, SystemClock(), file, frontends)
            show = None if args.quiet else show_live(run.line, run.picture, _LIVE_S)
            was_cut = await run_until_signal(run.run(request), run.end, show)
        return _finish(run, file, args.out, was_cut and duration_s is not None)

    try:
        return run_loop(main)
    finally:
        if not file.num_records:
            file.discard()


def _duration_s(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = parse_duration_s(text)
    if not 0 < seconds <= MAX_DURATION_S:
        raise ConfigError(
            f"--duration is {text}, must be above 0 and at most {MAX_DURATION_S:g} s",
            key="duration",
            remedy="omit it to record until Ctrl-C",
        )
    return seconds


def _finish(run: RecordingRun, file: UnsortedTrace, name: str, was_cut: bool) -> int:
    """Write the trace; report requests that are not in it."""
    failures = [source for source in run.sources if source.failure is not None]
    if len(failures) == len(run.sources) and not file.num_records:
        raise _explained(failures[0])
    for source in failures:
        assert source.failure is not None
        print(
            f"kvolt: {source.instance.process} stopped recording: {source.failure.message}", file=sys.stderr
        )
    for count, what in (
        (run.total("running"), "had not finished and are not included"),
        (run.total("unanswered"), "got no token and are not included"),
        (run.total("dropped"), "were dropped because the recorder was too slow"),
    ):
        if count:
            print(f"kvolt: {count} requests {what}", file=sys.stderr)
    if not file.num_records:
        print(f"kvolt: no requests recorded, {name} not written", file=sys.stderr)
        return 130 if was_cut else 1
    elapsed_s = run.elapsed_s
    print(f"{file.finish()} requests of {elapsed_s:.1f} s in {name}")
    return 130 if was_cut else int(bool(failures))


def _explained(source: _Source) -> KvoltError:
    error = source.failure
    assert error is not None
    if isinstance(error, NotFound):
        return Unavailable(
            f"{source.instance.process} at {source.instance.address} cannot record",
            endpoint=TRACE_ENDPOINT,
            reason="not_served",
            remedy="restart it with this version of kvolt",
        )
    return error
