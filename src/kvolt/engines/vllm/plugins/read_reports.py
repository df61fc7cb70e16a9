"""What ReaderWorker reports of reads in vLLM's connector statistics, as the process reads it that has the requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

READS = "kvolt_reads"
"""Of the statistics: a list of `Read`."""
_CONNECTOR = "KvoltNixlConnector"
"""Where several connectors report, each does so under its name."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """KV of one request, read by one worker and confirmed by its owner."""

    engine_id: str
    """The name of the request in the engine."""
    num_bytes: int
    took_s: float


def reads_of(statistics: Mapping[str, Any] | None) -> Iterator[Read]:
    """Reads that a step has reported."""
    if not statistics:
        return
    given = statistics.get(_CONNECTOR, statistics)
    if not isinstance(given, Mapping):
        return
    for each in given.get(READS) or ():
        try:
            yield msgspec.convert(each, Read)
        except msgspec.ValidationError:
            continue
