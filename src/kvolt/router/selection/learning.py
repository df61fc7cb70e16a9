"""OutcomeTracker: feeds the outcomes of requests to everything that learns from them. Pure.

Those are answer lengths (`output_lengths`), prefill times (`step_fit`), counters (`stats`) and a RequestObserver, which
maintains the approximate index and checks the index against reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.choice import WorkerChoice
from kvolt.router.policy.cost_model import Floats
from kvolt.router.policy.load import Rows
from kvolt.router.policy.output_lengths import OutputLengthEstimator
from kvolt.router.policy.step_fit import PaceEstimator
from kvolt.router.stats import RouterStats


class RequestObserver(Protocol):
    """Observer of requests. Every reserved request is released."""

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None: ...

    def on_reserved(self, reservation_id: int, choice: WorkerChoice) -> None: ...

    def on_first_token(
        self, reservation_id: int, choice: WorkerChoice, cached_tokens: int | None, now: float
    ) -> None:
        """`cached_tokens`: prompt tokens that were not computed, if the worker reports them."""
        ...

    def on_released(self, reservation_id: int) -> None: ...


class NullObserver:
    """A RequestObserver that does nothing."""

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None: ...

    def on_reserved(self, reservation_id: int, choice: WorkerChoice) -> None: ...

    def on_first_token(
        self, reservation_id: int, choice: WorkerChoice, cached_tokens: int | None, now: float
    ) -> None: ...

    def on_released(self, reservation_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Sent:
    choice: WorkerChoice
    row: int
    reserved_at: float
    external_share: float
    """Prefill seconds of other senders per second of this router's, until this prompt is computed."""


class OutcomeTracker:
    """See the module."""

    def __init__(self, observer: RequestObserver | None = None, corrects_times: bool = True) -> None:
        self.observer = observer or NullObserver()
        self.lengths = OutputLengthEstimator()
        self.stats = RouterStats()
        self._pace = PaceEstimator()
        self._corrects_times = corrects_times
        self._in_flight: dict[int, _Sent] = {}

    def add_row(self, row: int) -> None:
        self._pace.add_row(row)

    def drop_row(self, row: int) -> None:
        self._pace.drop_row(row)

    def output_tokens(self, request: Request) -> float:
        """Expected number of tokens."""
        return self.lengths.expected_tokens(request)

    def shared_steps(self, output_tokens: float) -> float:
        """Steps that an answer shares with the requests that decode now, which end, too."""
        return min(output_tokens, self.lengths.typical)

    def pace(self, rows: Rows | slice, now: float) -> Floats:
        """Observed over modelled prefill time by worker; 1 without correction."""
        return self._pace.factors(rows, now)

    def on_reserved(
        self, reservation_id: int, choice: WorkerChoice, row: int, own_s: float, now: float
    ) -> None:
        """`own_s`: predicted time until the worker has computed this router's earlier prompts."""
        external_s = max(choice.queue_s - own_s, 0.0)
        own_prefill_s = own_s + choice.prefill_s
        self._in_flight[reservation_id] = _Sent(
            choice, row, now, external_s / own_prefill_s if own_prefill_s > 0.0 else 0.0
        )
        request = choice.request
        num_blocks = -(-request.num_prompt_tokens // request.block_size) if request.block_size else 0
        self.stats.num_saturated += choice.is_saturated
        self.stats.record_decision(
            num_blocks, choice.overlap_blocks, choice.max_overlap_blocks, request.num_prompt_tokens
        )
        self.observer.on_reserved(reservation_id, choice)

    def on_first_token(self, reservation_id: int, cached_tokens: int | None, now: float) -> None:
        """Record the first token of a reserved request; once."""
        sent = self._in_flight[reservation_id]
        choice, request = sent.choice, sent.choice.request
        self.stats.record_first_token(now - sent.reserved_at, choice.predicted_s)
        if cached_tokens is not None and request.num_prompt_tokens:
            self.stats.reported_hit_rate.observe(min(cached_tokens / request.num_prompt_tokens, 1.0))
        # The TTFT of a transferred prompt measures the transfer, not the worker's steps.
        num_cached = (cached_tokens or 0) // (request.block_size or 1)
        was_onboarded = choice.has_tiers and num_cached > choice.held_blocks
        is_transferred = (
            request.handoff is not None or request.rendezvous is not None or request.has_prior_tokens
        )
        is_computed_here = not is_transferred and not was_onboarded
        if self._corrects_times and is_computed_here:
            model_s = choice.model_prefill_s * (1.0 + sent.external_share)
            if cached_tokens is not None:  # fewer or more tokens were computed than predicted
                model_s *= max(request.num_context_tokens - cached_tokens, 1) / max(choice.prefill_tokens, 1)
            self._pace.on_first_token(sent.row, sent.reserved_at, model_s, now)
        self.observer.on_first_token(reservation_id, choice, cached_tokens, now)

    def on_released(self, reservation_id: int, usage: Usage | None) -> None:
        """End a request. Unknown ids are ignored."""
        sent = self._in_flight.pop(reservation_id, None)
        if sent is None:
            return
        self.stats.num_ended += 1
        if usage is not None:
            self.lengths.record(sent.choice.request, usage.completion_tokens)
            self.stats.output_tokens.observe(usage.completion_tokens)
        self.observer.on_released(reservation_id)
