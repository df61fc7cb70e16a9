"""Result of a routing decision: the chosen worker rank with its predicted cost, and candidates for display. Pure."""

from __future__ import annotations

import math

import msgspec

from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.request import Request
from kvolt.router.policy.shadow import ShadowVerdict
from kvolt.router.worker_rank import WorkerDpRank


class WorkerChoice(msgspec.Struct, frozen=True):
    """Target of a request and its predicted cost there."""

    worker_rank: WorkerDpRank
    overlap_blocks: int
    queue_s: float
    prefill_s: float
    is_saturated: bool
    """Every candidate is saturated; this is the best of them."""
    request: Request
    prefill_tokens: int
    blocks: float
    """Blocks held when the answer is complete: prompt and answer."""
    held_blocks: int = 0
    """Blocks of the overlap on the device now; the rest is in lower tiers or pending."""
    max_overlap_blocks: int = 0
    """Longest overlap among the candidates."""
    source: WorkerDpRank | None = None
    """Worker rank that holds more of the prompt than the chosen one, in any tier."""
    source_blocks: int = 0
    has_tiers: bool = False
    """The worker has lower tiers: it may onboard more of the prompt than its device holds."""
    model_prefill_s: float = 0.0
    """Prefill time by the worker's own model, uncorrected."""
    room_s: float = 0.0
    """Predicted time until enough blocks are free; 0 if they are now."""
    transfer_s: float = 0.0
    """Predicted time to fetch the KV of a prompt computed elsewhere."""
    step_s: float = 0.0
    """Predicted time per output token."""
    max_step_tokens: float = math.inf
    """Prompt tokens that the worker computes in one step."""
    shadow_verdict: ShadowVerdict | None = None
    """Verdict of the shadow policy."""

    @property
    def predicted_s(self) -> float:
        """Predicted TTFT."""
        return max(self.queue_s, self.room_s) + self.prefill_s + self.transfer_s

    @property
    def usable_hashes(self) -> tuple[SequenceHash, ...]:
        return usable_hashes(self.request)


class CandidateCost(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate with every term of its cost and what they were computed from, for display."""

    instance: InstanceId
    dp_rank: int
    cost: float
    cost_terms: dict[str, float] = {}
    """Terms of the cost by name, in the unit of the policy; their sum is the cost."""
    is_saturated: bool
    is_chosen: bool
    overlap_blocks: float
    prefill_tokens: float
    blocks: float
    requests: float
    decoding: float
    queue_s: float
    prefill_s: float
    slowdown_s: float
    beside: float
    step_s: float
    copy_s: float
    transfer_s: float
    room_s: float
    total_blocks: float
    affinity: float
    preference: float
    """Sum of the weights of its taints that the request prefers."""
    pace: float
    """Observed over modelled prefill time; the times here include it."""
    held_blocks: float
    """Blocks of the overlap on the device now; the rest is pending."""
    failure_rate: float = 0.0
    """Share of recent requests that failed; the cost includes the expected retry."""
    has_step_model: bool = True
    """Whether the worker registered a step model; without one, the times are those of `DEFAULT_LATENCY`."""


def usable_hashes(request: Request) -> tuple[SequenceHash, ...]:
    """Hashes without the last block if it is complete: an engine always computes the last token."""
    return request.sequence_hashes[: (request.num_context_tokens - 1) // (request.block_size or 1)]
