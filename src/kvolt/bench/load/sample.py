"""One request as it was measured. Pure.

All latencies count from `due_s`, the time at which the request should have been sent: what a stalled server or a late
generator makes others wait is then in the figures (no coordinated omission). A request that went out a moment early,
as timers may, counts from when it went.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Failure(StrEnum):
    """Why a request brought no whole answer, where no status code says it (`http_503`)."""

    CONNECT = "connect_failed"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    HANG_UP = "hang_up"
    BROKEN_STREAM = "broken_stream"
    STREAM_ERROR = "stream_error"
    NO_STREAM = "not_a_stream"
    PROTOCOL = "protocol"
    CUT = "cut"
    """The run was ended before the answer was: no error of the server's."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds from the start of the run."""

    number: int
    session: int
    turn: int
    due_s: float
    started_s: float
    """When the generator came to it; later than due when it could not keep the schedule."""
    sent_s: float | None
    """When the bytes went out: after `started_s` by what a connection took."""
    first_s: float | None
    second_s: float | None
    last_s: float | None
    """When the first, second and last token came."""
    end_s: float
    max_gap_s: float
    num_events: int
    input_tokens: int
    """By the server's count; by ours where it gives none."""
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
        """From the first token to the second."""
        return None if self.second_s is None or self.first_s is None else self.second_s - self.first_s

    @property
    def itl_s(self) -> float | None:
        """The mean gap between events with tokens."""
        return self._decode_s(self.num_events)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, by the server's count of tokens."""
        return self._decode_s(self.output_tokens)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.from_s

    @property
    def tokens_per_s(self) -> float | None:
        """What this one user saw, once tokens came."""
        tpot_s = self.tpot_s
        return 1.0 / tpot_s if tpot_s else None

    def figures(self) -> dict[str, float | None]:
        """By the names of an SLA."""
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
