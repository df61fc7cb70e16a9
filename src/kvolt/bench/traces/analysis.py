"""Analysis of a trace: rate, lengths, sessions and prefix reuse. One pass, pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvolt.bench.traces.reuse import Distribution, Reuse, ReuseMeter, distribution
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

LRU_BLOCKS = (256, 1024, 4096, 16384, 65536)

_MAX_WINDOWS = 120
_FIRST_WINDOW_MS = 1000.0


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second in equal windows from the first request."""

    mean: float
    """Mean over the whole duration; 0 if all requests arrive at once."""
    peak: float
    """Rate of the busiest window."""
    window_s: float
    windows: tuple[float, ...]


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of a trace."""

    count: int
    turns: Distribution


class TraceAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `kvolt trace analyze`."""

    requests: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    rate: Rate
    input_length: Distribution
    output_length: Distribution
    block_sizes: tuple[int, ...]
    """Block sizes of records with hash ids."""
    reuse: Reuse | None
    """Prefix reuse; None without hash ids."""
    sessions: Sessions | None
    """None if no request has a session."""


def analyze(records: Iterable[TraceRecord], lru_blocks: Sequence[int] = LRU_BLOCKS) -> TraceAnalysis:
    """Analyze records in order of time. Keeps distinct blocks, lengths and sessions in memory, not records."""
    arrivals = _Arrivals()
    inputs: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    turns: Counter[str] = Counter()
    block_sizes: set[int] = set()
    reuse = ReuseMeter(lru_blocks)
    for record in records:
        arrivals.add(record.timestamp)
        inputs[record.input_length] += 1
        outputs[record.output_length] += 1
        if record.session is not None:
            turns[record.session] += 1
        if record.hash_ids:
            block_sizes.add(record.block_size)
        reuse.add(record)
    input_length, output_length = distribution(inputs), distribution(outputs)
    if input_length is None or output_length is None:
        raise ConfigError("the trace has no requests", key="trace", remedy="relax the filters")
    turn_counts = distribution(Counter(turns.values()))
    return TraceAnalysis(
        requests=input_length.count,
        duration_s=arrivals.duration_s,
        input_tokens=sum(length * times for length, times in inputs.items()),
        output_tokens=sum(length * times for length, times in outputs.items()),
        rate=arrivals.rate(),
        input_length=input_length,
        output_length=output_length,
        block_sizes=tuple(sorted(block_sizes)),
        reuse=reuse.result(),
        sessions=None if turn_counts is None else Sessions(count=len(turns), turns=turn_counts),
    )


class _Arrivals:
    """Counts per window. Windows are merged pairwise when there are too many, so memory is bounded."""

    def __init__(self) -> None:
        self._first_ms: float | None = None
        self._last_ms = 0.0
        self._window_ms = _FIRST_WINDOW_MS
        self._counts: list[int] = []

    def add(self, timestamp_ms: float) -> None:
        if self._first_ms is None:
            self._first_ms = timestamp_ms
        self._last_ms = timestamp_ms
        since_ms = max(0.0, timestamp_ms - self._first_ms)
        while since_ms >= self._window_ms * _MAX_WINDOWS:
            if len(self._counts) % 2:
                self._counts.append(0)
            self._counts = [
                one + other for one, other in zip(self._counts[::2], self._counts[1::2], strict=True)
            ]
            self._window_ms *= 2
        window = int(since_ms // self._window_ms)
        self._counts.extend([0] * (window + 1 - len(self._counts)))
        self._counts[window] += 1

    @property
    def duration_s(self) -> float:
        return (self._last_ms - (self._first_ms or 0.0)) / 1000

    def rate(self) -> Rate:
        window_s = self._window_ms / 1000
        windows = tuple(count / window_s for count in self._counts)
        requests = sum(self._counts)
        mean = requests / self.duration_s if self.duration_s else 0.0
        return Rate(mean=mean, peak=max(windows), window_s=window_s, windows=windows)
