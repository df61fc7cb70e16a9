"""Measurement of one request. Pure.

All latencies count from `due_s`, the scheduled start, so that delays by a stalled server or a late generator are
included (no coordinated omission). A request that a timer sent slightly early counts from its start.
"""

from __future__ import annotations

import csv
from enum import StrEnum
from typing import Any, TextIO

import msgspec


class Failure(StrEnum):
    """Reason of a failure without a status code (those are `http_503` and so on)."""

    CONNECT = "connect_failed"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    HANG_UP = "hang_up"
    BROKEN_STREAM = "broken_stream"
    STREAM_ERROR = "stream_error"
    NO_STREAM = "not_a_stream"
    PROTOCOL = "protocol"
    INTERRUPTED = "cut"
    """The run was ended before the response was complete; not a server error."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds from the start of the run."""

    number: int
    session: int
    turn: int
    due_s: float
    started_s: float
    """Actual start; later than `due_s` if the generator was late."""
    sent_s: float | None
    """Time at which the request was written; includes the wait for a connection."""
    first_s: float | None
    second_s: float | None
    last_s: float | None
    """Arrival of the first, second and last token."""
    end_s: float
    max_gap_s: float
    num_events: int
    input_tokens: int
    """Server's count, else the generator's."""
    output_tokens: int
    cached_tokens: int | None
    error: str | None = None
    message: str | None = None

    @property
    def from_s(self) -> float:
        return min(self.due_s, self.started_s)

    @property
    def lateness_s(self) -> float:
        return max(0.0, self.started_s - self.due_s)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.from_s

    @property
    def ttst_s(self) -> float | None:
        """Time from the first to the second token."""
        return None if self.second_s is None or self.first_s is None else self.second_s - self.first_s

    @property
    def itl_s(self) -> float | None:
        """Mean gap between events with tokens."""
        return self._decode_s(self.num_events)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, by the server's token count."""
        return self._decode_s(self.output_tokens)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.from_s

    @property
    def tokens_per_s(self) -> float | None:
        """Token rate after the first token."""
        tpot_s = self.tpot_s
        return 1.0 / tpot_s if tpot_s else None

    def latencies(self) -> dict[str, float | None]:
        """Metrics by their SLA names."""
        return {
            "ttft": self.ttft_s,
            "ttst": self.ttst_s,
            "itl": self.itl_s,
            "max_gap": self.max_gap_s if self.num_events > 1 else None,
            "tpot": self.tpot_s,
            "e2e": self.e2e_s,
        }

    def _decode_s(self, num_parts: int) -> float | None:
        if self.first_s is None or self.last_s is None or num_parts < 2:
            return None
        return (self.last_s - self.first_s) / (num_parts - 1)


_COLUMNS = (
    "number", "session", "turn", "due_s", "started_s", "sent_s", "end_s", "ttft_s", "ttst_s", "itl_s", "max_gap_s",
    "tpot_s", "e2e_s", "input_tokens", "cached_tokens", "output_tokens", "num_events", "error", "message",
)  # fmt: skip
"""Fields and properties of a Sample."""


class Rows:
    """Writes each request at its end; warm-up requests are marked."""

    def __init__(self, file: TextIO) -> None:
        self._writer = csv.writer(file, lineterminator="\n")
        self._writer.writerow(["counted", *(name.removeprefix("num_") for name in _COLUMNS)])

    def add(self, sample: Sample, counted: bool) -> None:
        values = [getattr(sample, name) for name in _COLUMNS]
        self._writer.writerow([int(counted), *(_rounded(value) for value in values)])


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
