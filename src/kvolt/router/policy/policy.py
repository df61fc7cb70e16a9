"""Policies: what sending a request to each worker would cost; the least is taken. Pure.

A policy is a function over arrays, one element for each candidate: a `RequestView` and a `WorkersView` in, costs out.
Ours are `classic`, which counts blocks as Dynamo does, and `latency`, which counts milliseconds (`_cost_model_native.c`
does what is said of it here in one pass, where it was built).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvolt.core.latency import Floats

if TYPE_CHECKING:
    native_latency: Callable[..., None] | None
else:
    try:
        from kvolt.router.policy._cost_model_native import costs as native_latency
    except ImportError:
        native_latency = None

WEIGHTS = ("overlap", "room", "affinity")
"""What a request may weigh in its own way; each policy reads those that it has."""


class RequestView(msgspec.Struct, frozen=True):
    """What is known of a request."""

    prompt_tokens: int
    block_size: int
    output_tokens: float
    """As many as are expected."""
    weights: Mapping[str, float] = {}
    """Of WEIGHTS, those that this request sets for itself."""
    arrivals_per_s: float = 0.0
    """Requests that come to a worker, on average over all of them."""

    @property
    def num_blocks(self) -> int:
        """Of the prompt."""
        return -(-self.prompt_tokens // self.block_size)


class WorkersView(msgspec.Struct, frozen=True):
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
    """By how much longer the answer of each other request there would take with this one in its steps."""
    beside: Floats
    """Requests that share its steps there, on average over its answer."""
    step_s: Floats
    """Time per token of its answer there, beside those."""
    copy_s: Floats
    """What a copy of the prompt's hot prefix at this worker saves those that come with the same."""
    transfer_s: Floats
    """Until the KV of its prompt has moved between this worker and the other end of its handoff."""
    room_s: Floats
    """Until enough blocks are free there for this prompt, where there are not now."""
    total_blocks: Floats
    """0 where it is not known."""
    affinity: Floats
    """1 where the request's session was served just now, less the longer ago that was, 0 elsewhere."""


_NOTHING = 700.0
"""The exponent below which a weight is none."""

Policy = Callable[[RequestView, WorkersView], Floats]


@dataclass(frozen=True, slots=True)
class ClassicWeights:
    overlap: float = 1.0
    affinity: float = 1.0
    """Blocks that who served the session last is favoured by."""


def classic(weights: ClassicWeights | None = None) -> Policy:
    """Blocks to prefill, times a weight, plus blocks in use: `overlap_weight * prefill_blocks + active_blocks`."""
    weighed = weights or ClassicWeights()

    def cost(request: RequestView, workers: WorkersView) -> Floats:
        overlap = request.weights.get("overlap", weighed.overlap)
        affinity = request.weights.get("affinity", weighed.affinity)
        cached = workers.overlap_blocks
        tokens = workers.prefill_tokens + request.prompt_tokens - cached * request.block_size
        active = workers.blocks + request.num_blocks
        return overlap * np.maximum(tokens, 0.0) / request.block_size + active - affinity * workers.affinity

    return cost


@dataclass(frozen=True, slots=True)
class LatencyWeights:
    room: float = 1.0
    """What a second counts of waiting for room in a worker's cache."""
    affinity: float = 0.01
    """Seconds that who served the session last is favoured by."""


def latency(weights: LatencyWeights | None = None) -> Policy:
    """Seconds that the request takes, and that it adds to others, as predicted:

    - until its first token: queue, prompt and the transfer of its KV; and until its last: expected tokens x the time
      of a step there, less what the answer takes wherever it goes;
    - of others: each beside it waits for the prompt's steps, each that comes while the worker is behind with prompts
      waits for it too, and each that shares steps with the answer takes longer;
    - less what a copy of a hot prefix saves those that come.
    """
    weighed = weights or LatencyWeights()

    def cost(request: RequestView, workers: WorkersView) -> Floats:
        room = request.weights.get("room", weighed.room)
        affinity = request.weights.get("affinity", weighed.affinity)
        prefill_s, queue_s = workers.prefill_s, workers.queue_s
        if native_latency is not None:
            found = np.empty(len(prefill_s))
            native_latency(
                request.output_tokens,
                request.arrivals_per_s,
                room,
                affinity,
                workers.beside,
                prefill_s,
                workers.step_s,
                workers.slowdown_s,
                queue_s,
                workers.room_s,
                workers.affinity,
                workers.copy_s,
                found,
            )
            found += workers.transfer_s
            return found
        answer_s = request.output_tokens * workers.step_s + workers.beside * workers.slowdown_s
        delayed = 1.0 + workers.beside + request.arrivals_per_s * (queue_s + prefill_s)
        # While it waits for its turn room may be made.
        costs: Floats = (
            prefill_s * delayed + np.maximum(queue_s, room * workers.room_s) + (answer_s - answer_s.min())
        )
        costs += workers.transfer_s
        costs -= workers.copy_s
        costs -= affinity * workers.affinity
        return costs

    return cost


def with_retries(costs: Floats, failure_rates: Floats) -> Floats:
    """Expected costs where an attempt may fail: then the request costs what the best other place takes.

    In whatever unit a policy counts. A place that fails every request is as good as the best of the others, never
    better, however idle its failures make it look.
    """
    if len(costs) < 2:
        return costs
    best, second = np.partition(costs, 1)[:2]
    retries = np.where(costs == best, second, best)
    expected: Floats = costs + failure_rates * np.maximum(retries - costs, 0.0)
    return expected


def prefer(costs: Floats, weights: Floats) -> Floats:
    """Costs of which those are lowered that have a weight above 0, and raised below: to 37 % and 272 % at most.

    As Dynamo does it with preferred taints.
    """
    factors = np.exp(-np.tanh(weights))
    return np.where(costs >= 0, costs * factors, costs / factors)


def pick(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """The least costly; one of several by chance. With a temperature any, the less costly the more likely.

    Costs are put between 0 and 1 first, so that a temperature means the same whatever a policy counts. A cost that is
    not a number is the highest.
    """
    least = float(costs[costs.argmin()])  # `min`, at half its cost
    if math.isnan(least):
        costs = np.nan_to_num(costs, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        least = float(costs.min())
    if temperature <= 0.0:
        (best,) = (costs == least).nonzero()
        return int(best[rng.randrange(len(best)) if len(best) > 1 else 0])
    spread = float(costs.max()) - least
    if not spread or not math.isfinite(spread):
        return rng.randrange(len(costs))
    # A low temperature leaves nothing of the others.
    weights = np.exp(np.maximum((least - costs) / spread, -_NOTHING * temperature) / temperature)
    bounds = np.cumsum(weights)
    return min(int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right")), len(costs) - 1)
