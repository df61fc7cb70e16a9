"""Reads reported by ReaderWorker in vLLM's connector statistics, decoded by kvolt's worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

READS = "kvolt_reads"
"""Key of the statistics: a list of `Read`."""
_CONNECTOR = "KvoltNixlConnector"
"""Name of its statistics when several connectors report."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """KV of one request, read by one worker and confirmed by its owner."""

    engine_id: str
    """Id of the request in the engine."""
    num_bytes: int
    took_s: float


def reads_of(statistics: Mapping[str, Any] | None) -> Iterator[Read]:
    """Reads reported with a step."""
    if not statistics:
        return
    own = statistics.get(_CONNECTOR, statistics)
    if not isinstance(own, Mapping):
        return
    for each in own.get(READS) or ():
        try:
            yield msgspec.convert(each, Read)
        except msgspec.ValidationError:
            continue
