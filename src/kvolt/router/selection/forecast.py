"""Forecast: predicted outcome of a request at the worker that a router would choose. Pure."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted outcome of routing a request now. Times in seconds."""

    instance: InstanceId
    queue_s: float
    """Until its prefill starts."""
    prefill_s: float
    transfer_s: float = 0.0
    """Time to fetch the KV of a prompt computed elsewhere."""
    num_arriving: float
    """Requests expected to arrive at the worker before the prompt is computed; they wait for it."""
    decoding: float
    """Decoding requests at the worker."""
    step_s: float
    """Step time of its answer, beside those."""
    slowdown_s: float
    """Delay of each of those over the answer."""
    output_tokens: float
    """Expected number."""
    missing_tokens: int
    """Prompt tokens whose KV is not at the worker."""
    has_own_model: bool = True
    """The worker registered a step model; otherwise a default is used."""
    num_worker_ranks: int
    """Candidates."""
    total_decoding: float
    """Decoding requests at all candidates."""
    base_step_s: float
    """Step time without the share of each decoding request."""
    added_step_s: float
    """Step time added by one request like this, in the middle of its answer."""

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s


@runtime_checkable
class SupportsForecast(Protocol):
    """A router that can predict the outcome of a request."""

    def forecast(self, request: Request) -> Forecast:
        """Reserves nothing. Raises Unavailable if no instance can take the request."""
        ...
