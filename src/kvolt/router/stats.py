"""RouterStats: outcome counters of a router's decisions, exported by the collectors. Pure, and bounded."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvolt.runtime.histogram import SECONDS, Histogram

_OVERHEAD_MS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 50.0)
_TOKENS = (50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 128_000)
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_SHARES = tuple(number / 20 for number in range(21))
_RATIOS = (0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


@dataclass(slots=True)
class RouterStats:
    """Counters of one router."""

    policy: str = ""
    """Policy name, if it has one."""
    num_started: int = 0
    """Reservations made."""
    num_ended: int = 0
    """Reservations released."""
    num_saturated: int = 0
    """Reservations made while all workers were saturated."""
    num_non_max_overlap: int = 0
    """Requests sent to a worker other than the one with the longest cached prefix."""
    hit_rate: Histogram = field(default_factory=lambda: Histogram(_SHARES))
    """Predicted share of the prompt's blocks that the chosen worker held."""
    reported_hit_rate: Histogram = field(default_factory=lambda: Histogram(_SHARES))
    """Share of the prompt that the worker reported as cached."""
    overlap_lost: Histogram = field(default_factory=lambda: Histogram(_BLOCKS))
    """Blocks that the worker with the longest prefix held beyond the chosen one."""
    input_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    predicted_ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    ttft_ratio: Histogram = field(default_factory=lambda: Histogram(_RATIOS))
    """Measured over predicted TTFT, per request."""
    lookup_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))
    scheduling_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))
    total_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))

    def record_decision(
        self, num_blocks: int, overlap: int, max_overlap_blocks: int, prompt_tokens: int
    ) -> None:
        """Count a reservation."""
        self.num_started += 1
        self.input_tokens.observe(prompt_tokens)
        if num_blocks:
            self.hit_rate.observe(overlap / num_blocks)
        if overlap < max_overlap_blocks:
            self.num_non_max_overlap += 1
            self.overlap_lost.observe(max_overlap_blocks - overlap)

    def record_overhead(self, find_s: float, total_s: float) -> None:
        """Count the overhead of a decision: index lookup, and total."""
        self.lookup_ms.observe(find_s * 1e3)
        self.scheduling_ms.observe(max(total_s - find_s, 0.0) * 1e3)
        self.total_ms.observe(total_s * 1e3)

    def record_first_token(self, measured_s: float, predicted_s: float) -> None:
        """Count a first token, with the time since the reservation."""
        self.ttft_s.observe(measured_s)
        self.predicted_ttft_s.observe(predicted_s)
        if predicted_s > 0.0:
            self.ttft_ratio.observe(measured_s / predicted_s)
