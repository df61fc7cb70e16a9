"""Transformations of traces: deterministic functions from records to records, lazy unless stated otherwise."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest as xxh3

from kvolt.bench.traces.prefixes import link
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

Records = Iterable[TraceRecord]


def scale_time(records: Records, speed: float) -> Iterator[TraceRecord]:
    """Divide arrival times by `speed`: 2 halves every gap."""
    if not (speed > 0 and math.isfinite(speed)):
        raise ConfigError(
            f"speed {speed:g} is not above 0", key="speed", remedy="for example 2 for twice as fast"
        )
    return (
        replace(
            record,
            timestamp=record.timestamp / speed,
            delay=None if record.delay is None else record.delay / speed,
        )
        for record in records
    )


def cut(records: Records, start_ms: float = 0.0, end_ms: float = math.inf) -> Iterator[TraceRecord]:
    """Requests from `start_ms` until before `end_ms`, at unchanged times; stops at the first later one."""
    for record in records:
        if record.timestamp >= end_ms:
            return
        if record.timestamp >= start_ms:
            yield record


def limit(records: Records, count: int) -> Iterator[TraceRecord]:
    """First `count` requests."""
    if count < 0:
        raise ConfigError(f"limit {count} is negative", key="limit", remedy="must be 0 or more")
    return islice(records, count)


def sample(records: Records, share: float, seed: int = 0) -> Iterator[TraceRecord]:
    """Random fraction of the requests, by seed; sessions are kept or dropped as a whole."""
    if not 0 <= share <= 1:
        raise ConfigError(
            f"sample {share:g} is not between 0 and 1", key="sample", remedy="for example 0.1 to keep a tenth"
        )
    below = int(share * 2**64)
    return (
        record
        for index, record in enumerate(records)
        if xxh3(f"{seed}/{index if record.session is None else 's' + record.session}".encode()) < below
    )


def merge(*traces: Records) -> Iterator[TraceRecord]:
    """Merge traces by time; at equal times in the order of the arguments.

    Hash ids are kept: apply `own_ids` first to traces that were recorded separately.
    """
    return heapq.merge(*traces, key=lambda record: record.timestamp)


def own_ids(records: Records, name: str) -> Iterator[TraceRecord]:
    """Make hash ids and sessions unique to `name`."""
    salt = xxh3(name.encode())
    for record in records:
        ids = tuple(link(salt, key) for key in record.hash_ids)
        session = None if record.session is None else f"{name}/{record.session}"
        yield replace(record, hash_ids=ids, session=session)


def shift(records: Records, by_ms: float) -> Iterator[TraceRecord]:
    """Shift all times; none may become negative."""
    for record in records:
        moved = record.timestamp + by_ms
        if moved < 0:
            raise ConfigError(
                f"a shift by {by_ms:g} ms moves a request to {moved:g} ms",
                key="shift",
                remedy=f"shift back by at most {record.timestamp:g} ms",
            )
        yield replace(record, timestamp=moved)


def start_at_zero(records: Records) -> Iterator[TraceRecord]:
    """Shift times so that the first request arrives at 0."""
    rest = iter(records)
    first = next(rest, None)
    if first is None:
        return iter(())
    return shift(chain([first], rest), -first.timestamp)


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Inclusive bounds in tokens."""

    min_input: int = 0
    max_input: float = math.inf
    min_output: int = 0
    max_output: float = math.inf
    max_total: float = math.inf
    """Maximum prompt plus output length."""


def filter_lengths(records: Records, bounds: LengthBounds) -> Iterator[TraceRecord]:
    """Keep requests within the bounds."""
    return (
        record
        for record in records
        if bounds.min_input <= record.input_length <= bounds.max_input
        and bounds.min_output <= record.output_length <= bounds.max_output
        and record.input_length + record.output_length <= bounds.max_total
    )


def renumber(records: Records) -> Iterator[TraceRecord]:
    """Renumber hash ids from 0 in order of appearance. Keeps all distinct ids in memory."""
    numbers: dict[int, int] = {}
    for record in records:
        ids = tuple(numbers.setdefault(key, len(numbers)) for key in record.hash_ids)
        yield replace(record, hash_ids=ids)


def sort_by_time(records: Records) -> list[TraceRecord]:
    """Sort by time (stable). Keeps all records in memory."""
    return sorted(records, key=lambda record: record.timestamp)
