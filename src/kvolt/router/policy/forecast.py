"""Forecast: what a request would come to where a router would send it, for who has another way for it. Pure."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a request would come to where a router would send it now. Times in seconds."""

    instance: InstanceId
    queue_s: float
    """Until its prompt's turn."""
    prefill_s: float
    transfer_s: float = 0.0
    """Until the KV of a prompt that was computed elsewhere is there."""
    arriving: float
    """Requests that are expected to come there until its prompt is computed: they wait for it."""
    decoding: float
    """Requests there that are being answered."""
    step_s: float
    """A step of its answer, beside those."""
    slowdown_s: float
    """By how much longer each of those takes for it, over the steps of its answer."""
    output_tokens: float
    """As many as are expected."""
    lacking_tokens: int
    """Of its prompt, those whose KV is not there now."""
    is_told: bool = True
    """By a step model of the worker's own; else the times are of a guess."""
    num_places: int
    """Where it could go."""
    all_decoding: float
    """Requests that are being answered at any of them."""
    base_s: float
    """A step there, less what it takes for each that it answers."""
    more_s: float
    """By how much a step there gets longer with one more like it, in the middle of its answer."""

    @property
    def first_token_s(self) -> float:
        return self.queue_s + self.prefill_s


@runtime_checkable
class Forecasting(Protocol):
    """A router that can say what a request would come to."""

    def forecast(self, request: Request) -> Forecast:
        """Books nothing. Unavailable when no instance can take the request."""
        ...
