"""Policies: cost of a request at each worker; the lowest cost wins. Pure.

A policy is a function over arrays with one element per candidate: RequestView and WorkersView in, costs out. `classic`
counts blocks like Dynamo, `latency` counts seconds (`_cost_model_native.c` computes it in one pass if it was built).
The cost of both is a sum of named terms, which `kvolt router explain` shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np

from kvolt.router.policy.cost_model import Floats

if TYPE_CHECKING:
    native_latency: Callable[..., None] | None
else:
    try:
        from kvolt.router.policy._cost_model_native import latency_costs as native_latency
    except ImportError:
        native_latency = None

WEIGHTS = ("overlap", "room", "affinity")
"""Weights that a request may override; each policy reads its own."""


class RequestView(msgspec.Struct, frozen=True):
    """A request as a policy sees it."""

    prompt_tokens: int
    block_size: int
    output_tokens: float
    """Expected number."""
    weights: Mapping[str, float] = {}
    """Weights set by this request; keys are in WEIGHTS."""
    arrivals_per_s: float = 0.0
    """Average arrival rate per worker."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt."""
        return -(-self.prompt_tokens // self.block_size)


class WorkersView(msgspec.Struct, frozen=True):
    """The candidates, one element each."""

    overlap_blocks: Floats
    """Leading blocks of the prompt that the worker holds."""
    prefill_tokens: Floats
    """Reserved prompt tokens not computed yet."""
    blocks: Floats
    """Blocks of the requests in flight."""
    requests: Floats
    decoding: Floats
    queue_s: Floats
    """Predicted time until the pending prompts are computed."""
    prefill_s: Floats
    """Predicted prefill time of this prompt, without cached blocks."""
    slowdown_s: Floats
    """Predicted delay of each other request's answer by this one."""
    beside: Floats
    """Average number of requests that share steps with the answer."""
    step_s: Floats
    """Predicted time per output token, with those requests."""
    copy_s: Floats
    """Predicted savings of later requests by a copy of the prompt's hot prefix at this worker."""
    transfer_s: Floats
    """Predicted time to move the prompt's KV between this worker and its peer."""
    room_s: Floats
    """Predicted time until enough blocks are free for the prompt; 0 if they are now."""
    total_blocks: Floats
    """0 if unknown."""
    affinity: Floats
    """1 at the worker that just served the session, decaying with time; 0 elsewhere."""


_ZERO_EXPONENT = 700.0
"""Exponent below which a weight is zero."""

Policy = Callable[[RequestView, WorkersView], Floats]

CostTerms = dict[str, Floats]
"""Terms of a cost by name, one element per candidate; their sum is the cost."""


@runtime_checkable
class SupportsTerms(Protocol):
    """A policy whose cost is a sum of terms."""

    def terms(self, request: RequestView, workers: WorkersView) -> CostTerms: ...


def cost_terms(policy: Policy, request: RequestView, workers: WorkersView, costs: Floats) -> CostTerms:
    """Terms of the costs that the policy has computed; a policy that names none has one."""
    return policy.terms(request, workers) if isinstance(policy, SupportsTerms) else {"policy": costs}


def _sum_terms(terms: CostTerms) -> Floats:
    return reduce(add, terms.values())  # np.sum would copy the terms into one array first


@dataclass(frozen=True, slots=True)
class ClassicWeights:
    overlap: float = 1.0
    affinity: float = 1.0
    """Bonus in blocks for the worker that served the session last."""


class ClassicPolicy:
    """`overlap_weight * prefill_blocks + active_blocks`, as Dynamo computes it."""

    def __init__(self, weights: ClassicWeights) -> None:
        self._weights = weights

    def __call__(self, request: RequestView, workers: WorkersView) -> Floats:
        return _sum_terms(self.terms(request, workers))

    def terms(self, request: RequestView, workers: WorkersView) -> CostTerms:
        overlap = request.weights.get("overlap", self._weights.overlap)
        affinity = request.weights.get("affinity", self._weights.affinity)
        cached = workers.overlap_blocks
        tokens = workers.prefill_tokens + request.prompt_tokens - cached * request.block_size
        return {
            "prefill": overlap * np.maximum(tokens, 0.0) / request.block_size,
            "in_use": workers.blocks + request.num_blocks,
            "affinity": -affinity * workers.affinity,
        }


def classic(weights: ClassicWeights | None = None) -> ClassicPolicy:
    return ClassicPolicy(weights or ClassicWeights())


@dataclass(frozen=True, slots=True)
class LatencyWeights:
    room: float = 1.0
    """Weight of the time until enough blocks are free."""
    affinity: float = 0.01
    """Bonus in seconds for the worker that served the session last."""


class LatencyPolicy:
    """Predicted seconds that the request takes and adds to others."""

    def __init__(self, weights: LatencyWeights) -> None:
        self._weights = weights

    def __call__(self, request: RequestView, workers: WorkersView) -> Floats:
        if native_latency is None:
            return _sum_terms(self.terms(request, workers))
        costs: Floats = np.empty(len(workers.prefill_s))
        native_latency(
            request.output_tokens,
            request.arrivals_per_s,
            request.weights.get("room", self._weights.room),
            request.weights.get("affinity", self._weights.affinity),
            workers.beside,
            workers.prefill_s,
            workers.step_s,
            workers.slowdown_s,
            workers.queue_s,
            workers.room_s,
            workers.affinity,
            workers.copy_s,
            costs,
        )
        costs += workers.transfer_s
        return costs

    def terms(self, request: RequestView, workers: WorkersView) -> CostTerms:
        """Terms of the cost.

        - `queue`, `prefill`, `transfer`: its own time until the first token.
        - `answer`: its own time from then on, and what it adds to the answers that share steps with it; less the
          minimum over all workers.
        - `in_flight`: requests in flight wait for the prompt's steps.
        - `later`: requests that arrive while the worker has pending prompts wait for the prompt, too.
        - `copy`: less the predicted savings by a copy of a hot prefix.
        """
        room = request.weights.get("room", self._weights.room)
        affinity = request.weights.get("affinity", self._weights.affinity)
        prefill_s, queue_s = workers.prefill_s, workers.queue_s
        answer_s = request.output_tokens * workers.step_s + workers.beside * workers.slowdown_s
        return {
            # Blocks may become free while it waits in the queue.
            "queue": np.maximum(queue_s, room * workers.room_s),
            "prefill": prefill_s,
            "transfer": workers.transfer_s,
            "answer": answer_s - answer_s.min(),
            "in_flight": workers.beside * prefill_s,
            "later": request.arrivals_per_s * (queue_s + prefill_s) * prefill_s,
            "copy": -workers.copy_s,
            "affinity": -affinity * workers.affinity,
        }


def latency(weights: LatencyWeights | None = None) -> LatencyPolicy:
    return LatencyPolicy(weights or LatencyWeights())


def add_retry_cost(costs: Floats, failure_rates: Floats) -> Floats:
    """Expected costs including a retry at the best other worker after a failure.

    Independent of the policy's unit. A worker that fails all requests costs as much as the best other worker, however
    idle its failures make it look.
    """
    if len(costs) < 2:
        return costs
    best, second = np.partition(costs, 1)[:2]
    retries = np.where(costs == best, second, best)
    expected: Floats = costs + failure_rates * np.maximum(retries - costs, 0.0)
    return expected


def apply_preference(costs: Floats, weights: Floats) -> Floats:
    """Lower the costs of workers with positive weights and raise those with negative ones, to 37 % and 272 %
    at most.

    Same formula as Dynamo's preferred taints.
    """
    factors = np.exp(-np.tanh(weights))
    return np.where(costs >= 0, costs * factors, costs / factors)


def pick_index(costs: Floats, rng: random.Random, temperature: float = 0.0) -> int:
    """Index of the lowest cost, ties broken at random. With a temperature, sample with lower costs more
    likely.

    Costs are normalized to 0..1, so that a temperature means the same for every policy. NaN counts as the highest cost.
    """
    lowest = float(costs[costs.argmin()])  # half the cost of `min`
    if math.isnan(lowest):
        costs = np.nan_to_num(costs, nan=math.inf, posinf=math.inf, neginf=-math.inf)
        lowest = float(costs.min())
    if temperature <= 0.0:
        (best,) = (costs == lowest).nonzero()
        return int(best[rng.randrange(len(best)) if len(best) > 1 else 0])
    spread = float(costs.max()) - lowest
    if not spread or not math.isfinite(spread):
        return rng.randrange(len(costs))
    # Clamped, since a low temperature underflows.
    weights = np.exp(np.maximum((lowest - costs) / spread, -_ZERO_EXPONENT * temperature) / temperature)
    bounds = np.cumsum(weights)
    return min(int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right")), len(costs) - 1)
