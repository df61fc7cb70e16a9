"""CSV output with one line per request. Pure: the caller owns the file."""

from __future__ import annotations

import csv
from collections.abc import Callable
from typing import Any, TextIO

from kvolt.bench.load.sample import Sample

_COLUMNS: dict[str, Callable[[Sample], Any]] = {
    "number": lambda sample: sample.number,
    "session": lambda sample: sample.session,
    "turn": lambda sample: sample.turn,
    "due_s": lambda sample: _rounded(sample.due_s),
    "started_s": lambda sample: _rounded(sample.started_s),
    "sent_s": lambda sample: _rounded(sample.sent_s),
    "end_s": lambda sample: _rounded(sample.end_s),
    "ttft_s": lambda sample: _rounded(sample.ttft_s),
    "ttst_s": lambda sample: _rounded(sample.ttst_s),
    "itl_s": lambda sample: _rounded(sample.itl_s),
    "max_gap_s": lambda sample: _rounded(sample.max_gap_s),
    "tpot_s": lambda sample: _rounded(sample.tpot_s),
    "e2e_s": lambda sample: _rounded(sample.e2e_s),
    "input_tokens": lambda sample: sample.input_tokens,
    "cached_tokens": lambda sample: sample.cached_tokens,
    "output_tokens": lambda sample: sample.output_tokens,
    "events": lambda sample: sample.num_events,
    "error": lambda sample: sample.error,
    "message": lambda sample: sample.message,
}


class Rows:
    """Writes each request at its end; warm-up requests are marked."""

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(["counted", *_COLUMNS])

    def add(self, sample: Sample, counted: bool) -> None:
        self._writer.writerow([int(counted), *(value_of(sample) for value_of in _COLUMNS.values())])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
