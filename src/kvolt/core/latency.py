"""Step models: how long an engine step takes, from what is in it.

One model serves the router, the planner, the simulated engine and the twin, so that they cannot
disagree about time. LatencyModel is the one that is fitted and told to others; OccupancyModel is
the shape of timing that Dynamo's mocker has. Who only needs the time asks for a StepModel.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvolt.core.load import StepStats

Floats = npt.NDArray[np.float64]

_HOUR_S = 3600.0
Price = Annotated[float, Meta(ge=0.0, le=_HOUR_S)]
"""Seconds of a step model. Bounded where one is decoded: a peer that registers NaN or a negative time would decide
where all requests go."""
SignedPrice = Annotated[float, Meta(ge=-_HOUR_S, le=_HOUR_S)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class StepModel(Protocol):
    """Whatever can tell the time of a step. Pure: the same step, the same time."""

    def step_s(self, step: StepStats) -> float: ...

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """A prompt alone in one step, its first `num_cached` tokens already held."""
        ...

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` sequences."""
        ...

    def decode_s_each(self, batches: Floats, context_tokens: Floats) -> Floats:
        """`decode_s` of many steps at once."""
        ...


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: a sum of what is in it, each at its price.

    `base + prefill*p + prefill_context*px + batch*b + context*c`, and `prefill_step` if it prefills at all.
    """

    base_s: Price = 0.0
    prefill_token_s: Price = 0.0
    prefill_context_s: Price = 0.0
    batch_s: Price = 0.0
    context_token_s: Price = 0.0
    prefill_step_s: Price = 0.0
    """What the first prompt token costs besides: engines replay steps that only decode, and launch the others
    kernel by kernel."""
    shared_kv_read: Share = 1.0
    """Cost of reading a KV block once more for another sequence, as a share of the first read: 1 where each sequence
    reads its own (paged attention), 0 where a block that several share is read once (cascade attention)."""

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

    def decode_s_each(self, batches: Floats, context_tokens: Floats) -> Floats:
        return self.base_s + self.batch_s * batches + self.context_token_s * context_tokens


class OccupancyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: squares of the prompt tokens and of the share of the KV cache that is read.

    A step that prefills and decodes takes the sum of both. A decode does not depend on the batch.
    """

    prefill_base_s: Price = 0.0
    prefill_token_s: Price = 0.0
    prefill_square_s: Price = 0.0
    """Per squared prompt token of the step."""
    decode_base_s: Price = 0.0
    decode_share_s: SignedPrice = 0.0
    """Of a cache that is read as a whole. This and the next may be negative."""
    decode_square_s: SignedPrice = 0.0
    """Per squared share."""
    decode_least_s: Price = 0.0
    kv_tokens: Annotated[int, Meta(ge=1)] = 1
    """Tokens that the whole cache holds."""
    shared_kv_read: Share = 1.0
    """As LatencyModel's."""

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

    def decode_s_each(self, batches: Floats, context_tokens: Floats) -> Floats:
        share = np.minimum(context_tokens / self.kv_tokens, 1.0)
        decode_s = self.decode_base_s + (self.decode_share_s + self.decode_square_s * share) * share
        return np.where(batches > 0, np.maximum(decode_s, self.decode_least_s), 0.0)


def kv_tokens_read(step: StepStats, shared_kv_read: float) -> float:
    """Context tokens of a step, of which repeated reads of shared blocks count for `shared_kv_read` each."""
    return step.context_tokens - (1.0 - shared_kv_read) * step.shared_tokens


Model = TypeVar("Model", LatencyModel, OccupancyModel)


def at_speed(model: Model, speed: float) -> Model:
    """The same engine, so many times as fast."""
    prices = {name: getattr(model, name) / speed for name in model.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(model, **prices)


def prompt_s(model: StepModel, num_tokens: int, num_cached: int, chunk: int) -> float:
    """A prompt alone, in steps of at most `chunk` tokens. Its last token is computed, cached or not."""
    time_s, start = 0.0, min(num_cached, num_tokens - 1)
    while start < num_tokens:
        size = min(num_tokens - start, chunk)
        start += size
        time_s += model.step_s(StepStats(prefill_tokens=size, prefill_context=size * start))
    return time_s


def features(step: StepStats) -> tuple[float, float, float, float, float, float, float]:
    """The row of a step in the linear fit, in the order of LatencyModel's fields; the last column is fitted as the
    cost of a repeated read, and `shared_kv_read` is its ratio to `context_token_s`."""
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
