"""Policies: what sending a request to each worker would cost; the least is taken. Pure.

A policy is a function over arrays, one element for each candidate: a `RequestView` and a `WorkersView` in, costs out.
Ours are `classic`, which counts blocks as Dynamo does, and `latency`, which counts milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvolt.core.latency import Floats


@dataclass(frozen=True, slots=True)
class RequestView:
    """What is known of a request."""

    prompt_tokens: int
    block_size: int
    output_tokens: float
    """As many as are expected."""

    @property
    def num_blocks(self) -> int:
        """Of the prompt."""
        return -(-self.prompt_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class WorkersView:
    """The candidates, an element each."""

    overlap_blocks: Floats
    """Of the prompt, from its first block on, that the worker holds."""
    prefill_tokens: Floats
    """Booked there and not computed yet."""
    blocks: Floats
    """Of the requests under way there."""
    requests: Floats
    decoding: Floats
    queue_s: Floats
    """Until it has computed the prompts that it was sent."""
    prefill_s: Floats
    """What this prompt would take there, less what it holds."""
    slowdown_s: Floats
    """By how much longer the steps of the answer's time would take there with this request in them."""
    total_blocks: Floats


_NOTHING = 700.0
"""The exponent below which a weight is none."""

Policy = Callable[[RequestView, WorkersView], Floats]


@dataclass(frozen=True, slots=True)
class ClassicWeights:
    overlap: float = 1.0


def classic(weights: ClassicWeights | None = None) -> Policy:
    """Blocks to prefill, times a weight, plus blocks in use: `overlap_weight * prefill_blocks + active_blocks`."""
    overlap = (weights or ClassicWeights()).overlap

    def cost(request: RequestView, workers: WorkersView) -> Floats:
        cached = workers.overlap_blocks
        tokens = workers.prefill_tokens + request.prompt_tokens - cached * request.block_size
        active = workers.blocks + request.num_blocks
        return overlap * np.maximum(tokens, 0.0) / request.block_size + active

    return cost


@dataclass(frozen=True, slots=True)
class LatencyWeights:
    others: float = 0.03
    """What a second of somebody else's counts beside a second of this request's."""
    room: float = 1.0
    """What a full cache counts: seconds for each time over that the blocks under way would fill it."""


def latency(weights: LatencyWeights | None = None) -> Policy:
    """Seconds that are added: until its first token, and to the answers of others that decode there."""
    weighed = weights or LatencyWeights()

    def cost(request: RequestView, workers: WorkersView) -> Floats:
        own = workers.queue_s + workers.prefill_s
        others = workers.decoding * (workers.prefill_s + workers.slowdown_s)
        wanted = workers.blocks + request.num_blocks
        over = np.maximum(wanted - workers.total_blocks, 0.0) / np.maximum(workers.total_blocks, 1.0)
        crowding = np.where(workers.total_blocks > 0, over, 0.0)  # 0: it did not say how many it has
        return own + weighed.others * others + weighed.room * crowding

    return cost


def pick(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """The least costly; one of several by chance. With a temperature any, the less costly the more likely.

    Costs are put between 0 and 1 first, so that a temperature means the same whatever a policy counts.
    """
    least = float(costs.min())
    if temperature <= 0.0:
        (best,) = np.nonzero(costs == least)
        return int(best[rng.randrange(len(best)) if len(best) > 1 else 0])
    spread = float(costs.max()) - least
    if not spread or not math.isfinite(spread):
        return rng.randrange(len(costs))
    # A low temperature leaves nothing of the others.
    weights = np.exp(np.maximum((least - costs) / spread, -_NOTHING * temperature) / temperature)
    bounds = np.cumsum(weights)
    return min(int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right")), len(costs) - 1)
