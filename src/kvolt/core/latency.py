"""Step models: predict the duration of an engine step from its contents.

The router, the planner, the simulated engine and the twin share one model. LatencyModel is fitted and published;
OccupancyModel reproduces the timing of Dynamo's mocker. StepModel is the interface of both.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kvolt.core.load import StepStats

_HOUR_S = 3600.0
Seconds = Annotated[float, Meta(ge=0.0, le=_HOUR_S)]
"""Coefficient of a step model in seconds. Bounded on decoding: a peer that registers NaN or a negative time would
attract all requests."""
SignedSeconds = Annotated[float, Meta(ge=-_HOUR_S, le=_HOUR_S)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]


class StepModel(Protocol):
    """Predicts the duration of a step. Pure."""

    def step_s(self, step: StepStats) -> float: ...

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Duration of a step that prefills one prompt, whose first `num_cached` tokens are cached."""
        ...

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """Duration of a step that decodes one token of each of `batch` sequences."""
        ...


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Linear step model.

    `base + prefill*p + prefill_context*px + batch*b + context*c`, plus `prefill_step` if the step prefills.
    """

    base_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    prefill_context_s: Seconds = 0.0
    batch_s: Seconds = 0.0
    context_token_s: Seconds = 0.0
    prefill_step_s: Seconds = 0.0
    """Extra cost of a step with prefill: engines replay decode-only steps as graphs and launch others kernel by
    kernel."""
    shared_kv_read: Fraction = 1.0
    """Cost of rereading a shared KV block for another sequence, as a fraction of the first read: 1 for paged
    attention, 0 for cascade attention, which reads a shared block once."""

    def step_s(self, step: StepStats) -> float:
        time_s = (
            self.base_s
            + self.prefill_token_s * step.prefill_tokens
            + self.prefill_context_s * step.prefill_context
            + self.batch_s * step.batch
            + self.context_token_s * kv_tokens_read(step, self.shared_kv_read)
        )
        return time_s + self.prefill_step_s if step.prefill_tokens else time_s

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        return self.step_s(_prompt_step(num_tokens, num_cached))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s(StepStats(batch=batch, context_tokens=context_tokens))


class OccupancyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Step model quadratic in the prompt tokens and in the fraction of the KV cache that is read.

    Prefill and decode of one step add up. Decode does not depend on the batch size.
    """

    prefill_base_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    prefill_square_s: Seconds = 0.0
    """Per squared prompt token of the step."""
    decode_base_s: Seconds = 0.0
    decode_share_s: SignedSeconds = 0.0
    """Seconds per full read of the cache. This and the next coefficient may be negative."""
    decode_square_s: SignedSeconds = 0.0
    """Seconds per squared fraction of the cache."""
    decode_least_s: Seconds = 0.0
    kv_tokens: Annotated[int, Meta(ge=1)] = 1
    """Capacity of the KV cache in tokens."""
    shared_kv_read: Fraction = 1.0
    """As in LatencyModel."""

    def step_s(self, step: StepStats) -> float:
        time_s = 0.0
        if num_tokens := step.prefill_tokens:
            time_s = (
                self.prefill_base_s + (self.prefill_token_s + self.prefill_square_s * num_tokens) * num_tokens
            )
        if step.batch:
            share = min(kv_tokens_read(step, self.shared_kv_read) / self.kv_tokens, 1.0)
            decode_s = self.decode_base_s + (self.decode_share_s + self.decode_square_s * share) * share
            time_s += max(decode_s, self.decode_least_s)
        return time_s

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        return self.step_s(_prompt_step(num_tokens, num_cached))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        return self.step_s(StepStats(batch=batch, context_tokens=context_tokens))


def kv_tokens_read(step: StepStats, shared_kv_read: float) -> float:
    """Context tokens of a step; rereads of shared blocks count as the fraction `shared_kv_read`."""
    return step.context_tokens - (1.0 - shared_kv_read) * step.shared_tokens


Model = TypeVar("Model", LatencyModel, OccupancyModel)


def scale_speed(model: Model, speed: float) -> Model:
    """Divide all times of the model by `speed`."""
    scaled = {name: getattr(model, name) / speed for name in model.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(model, **scaled)


def prompt_s(model: StepModel, num_tokens: int, num_cached: int, chunk: int) -> float:
    """Time to prefill one prompt in steps of at most `chunk` tokens. The last token is always computed."""
    time_s, start = 0.0, min(num_cached, num_tokens - 1)
    while start < num_tokens:
        size = min(num_tokens - start, chunk)
        start += size
        time_s += model.step_s(StepStats(prefill_tokens=size, prefill_context=size * start))
    return time_s


def fit_features(step: StepStats) -> tuple[float, float, float, float, float, float, float]:
    """Row of a step in the linear fit, in the order of LatencyModel's fields.

    The last coefficient is the cost of a reread; `shared_kv_read` is its ratio to `context_token_s`.
    """
    return (
        1.0,
        step.prefill_tokens,
        step.prefill_context,
        step.batch,
        step.context_tokens - step.shared_tokens,
        1.0 if step.prefill_tokens else 0.0,
        step.shared_tokens,
    )


def _prompt_step(num_tokens: int, num_cached: int) -> StepStats:
    new = max(num_tokens - num_cached, 0)
    return StepStats(prefill_tokens=new, prefill_context=new * num_tokens)
