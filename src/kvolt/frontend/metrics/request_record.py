"""Times and counts of one request, recorded as it runs and reported to the metrics when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvolt.core.errors import KvoltError
from kvolt.frontend.metrics.edge_metrics import FrontendMetrics, ModelSeries
from kvolt.frontend.openai_api.errors import CANCELLED_STATUS, error_type_label, status_of
from kvolt.frontend.tenants.budgets import TenantRequest

_MAX_REASON_CHARS = 200
_NOT_CHARGED = frozenset({429, 500, 503, 504})
"""Statuses of requests that the server did not answer for reasons of its own."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Context manager of one request: the exception that leaves it determines the outcome.

    A stream outlives its handler: `hand_over`, then a second `with` around the writing.
    """

    _metrics: FrontendMetrics
    _request_id: str
    _endpoint: str
    _now: Callable[[], float]
    started_at: float = field(init=False)
    _marked_at: float = field(init=False)
    _first_at: float | None = None
    _handed_over: bool = False
    _model: str = "other"
    _series: ModelSeries | None = None
    streams: bool = False
    on_end: Callable[[], None] | None = None
    """Releases the request's admission slot."""
    tenant: TenantRequest | None = None
    """The request's charge to its tenant, if the frontend has API keys."""
    failure: KvoltError | None = None
    """Sent to the client in its stream."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    journey_fields: Callable[[], dict[str, object]] = dict
    """Fields of the log line: workers, stage times and retries. Called if the line is written."""

    def __post_init__(self) -> None:
        self.started_at = self._marked_at = self._now()

    def __enter__(self) -> Self:
        self._handed_over = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._handed_over:
            self._end(error or self.failure)

    # --- as it goes

    def of_model(self, name: str) -> None:
        """Set the model. It is known to exist, so its name may be a label."""
        self._series = self._metrics.model(name)
        self._model = self._metrics.label(name)
        self._series.active += 1
        self._metrics.started[self._labels()] += 1

    def hand_over(self) -> None:
        self._handed_over = True

    def stage(self, name: str) -> None:
        """Record the time since the last stage under this name."""
        now = self._now()
        self._metrics.stages[name].observe(now - self._marked_at)
        self._marked_at = now

    def prompt_tokens(self, num_tokens: int) -> None:
        self.input_tokens = num_tokens
        if self._series is not None:
            self._series.input_tokens.observe(num_tokens)

    def on_first_token(self) -> None:
        if self._first_at is None and self._series is not None:
            self._first_at = self._now()
            self._metrics.stages["first_delta"].observe(self._first_at - self._marked_at)
            self._series.time_to_first_token.observe(self._first_at - self.started_at)

    def on_token_gap(self, seconds: float, num_tokens: int) -> None:
        if self._series is not None:
            self._series.gap.observe(seconds, num_tokens)

    # --- what the client may ask for

    def timing(self) -> dict[str, float]:
        """Times in milliseconds by the names of `nvext.timing`."""
        now = self._now()
        timing = {"total_time_ms": (now - self.started_at) * 1e3}
        if self._first_at is not None:
            timing["ttft_ms"] = (self._first_at - self.started_at) * 1e3
        return timing

    def timing_headers(self) -> dict[str, str]:
        timing = self.timing()
        parts = [f"total;dur={timing['total_time_ms']:.2f}"]
        if "ttft_ms" in timing:
            parts.append(f"ttft;dur={timing['ttft_ms']:.2f}")
        return {"server-timing": ", ".join(parts)}

    # ---

    def _labels(self) -> tuple[str, str, str]:
        return self._model, self._endpoint, "stream" if self.streams else "unary"

    @property
    def elapsed_s(self) -> float:
        return self._now() - self.started_at

    def _end(self, error: BaseException | None) -> None:
        if self.on_end is not None:
            self.on_end()
            self.on_end = None
        if self.tenant is not None:
            is_server_error = error is not None and status_of(error) in _NOT_CHARGED
            self.tenant.end(self.output_tokens, is_server_error)
            self.tenant = None
        metrics, series, labels = self._metrics, self._series, self._labels()
        if series is None:
            metrics.started[labels] += 1
        else:
            series.active -= 1
            series.request_duration.observe(self._now() - self.started_at)
            series.output_tokens.observe(self.output_tokens)
            series.output_tokens_total += self.output_tokens
            series.cached_tokens.observe(self.cached_tokens)
        error_type, status = "", 200
        if error is not None:
            error_type = error_type_label(error)
            status = status_of(error)
            if status == CANCELLED_STATUS:
                metrics.cancelled[labels] += 1
                if isinstance(error, asyncio.CancelledError):
                    metrics.disconnected += 1
            elif status == 429 and isinstance(error, KvoltError):
                metrics.rejected[labels[:2]] += 1
        metrics.requests[*labels, "success" if error is None else "error", error_type] += 1
        metrics.request_log.write(self._now(), lambda: self._fields(status, error))
        self.journey_fields = dict  # breaks the reference cycle of journeys, answer and record

    def _fields(self, status: int, error: BaseException | None) -> dict[str, object]:
        """Fields of the log line; the model is one that is served, since clients make up others."""
        fields: dict[str, object] = {
            "request_id": self._request_id,
            "endpoint": self._endpoint,
            "status": status,
            "model": self._model,
        }
        if self.input_tokens:
            fields["prompt_tokens"] = self.input_tokens
            fields["cached_tokens"] = self.cached_tokens
            fields["output_tokens"] = self.output_tokens
        fields |= self.journey_fields()
        if self._first_at is not None:
            fields["ttft_s"] = round(self._first_at - self.started_at, 3)
        fields["time_s"] = round(self.elapsed_s, 3)
        if isinstance(error, KvoltError):
            fields["error"] = error.message[:_MAX_REASON_CHARS]
        return fields
