"""RouterStats: what came of a router's decisions, counted; `metrics` tells it to Prometheus. Pure, and bounded."""

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
    """Of one router."""

    policy: str = ""
    """By name, where it has one."""
    num_started: int = 0
    """Booked."""
    num_ended: int = 0
    """Freed, however that came."""
    num_saturated: int = 0
    """Booked though every worker had enough to do already."""
    num_less_overlap: int = 0
    """Sent to somebody though another held more of the prompt."""
    hit_rate: Histogram = field(default_factory=lambda: Histogram(_SHARES))
    """The share of each prompt's blocks that its worker was said to hold."""
    real_hit_rate: Histogram = field(default_factory=lambda: Histogram(_SHARES))
    """The same, by the worker's own word."""
    overlap_lost: Histogram = field(default_factory=lambda: Histogram(_BLOCKS))
    """Blocks that another held beyond who got the request."""
    input_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    predicted_ttft_s: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    ttft_ratio: Histogram = field(default_factory=lambda: Histogram(_RATIOS))
    """Real over predicted, of each."""
    find_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))
    weigh_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))
    total_ms: Histogram = field(default_factory=lambda: Histogram(_OVERHEAD_MS))

    def decided(self, num_blocks: int, overlap: int, most_overlap: int, prompt_tokens: int) -> None:
        """A request was sent."""
        self.num_started += 1
        self.input_tokens.observe(prompt_tokens)
        if num_blocks:
            self.hit_rate.observe(overlap / num_blocks)
        if overlap < most_overlap:
            self.num_less_overlap += 1
            self.overlap_lost.observe(most_overlap - overlap)

    def took(self, find_s: float, total_s: float) -> None:
        """What a decision took: the index, and all of it."""
        self.find_ms.observe(find_s * 1e3)
        self.weigh_ms.observe(max(total_s - find_s, 0.0) * 1e3)
        self.total_ms.observe(total_s * 1e3)

    def begun(self, real_s: float, predicted_s: float) -> None:
        """An answer has begun so long after its request was sent."""
        self.ttft_s.observe(real_s)
        self.predicted_ttft_s.observe(predicted_s)
        if predicted_s > 0.0:
            self.ttft_ratio.observe(real_s / predicted_s)
