"""Prometheus metrics of the KV tiers of a process's workers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.host_tier import HostTier

_TIERS = (Tier.HOST, Tier.DISK, Tier.OBJECT, Tier.PEER)
WINDOW = 1000
"""Requests in a HitWindow."""


class HitWindow:
    """Recently requested prompt blocks and how many each tier provided."""

    def __init__(self, size: int = WINDOW) -> None:
        self._recent: deque[tuple[int, Sequence[tuple[Tier, int]]]] = deque()
        self._size = size
        self._hits: Counter[Tier] = Counter()
        self.num_requested = 0

    def add(self, num_requested: int, by_tier: Sequence[tuple[Tier, int]]) -> None:
        """Record the blocks of one prompt."""
        self._recent.append((num_requested, by_tier))
        self.num_requested += num_requested
        self._hits.update(dict(by_tier))
        if len(self._recent) > self._size:
            oldest, hits = self._recent.popleft()
            self.num_requested -= oldest
            self._hits.subtract(dict(hits))

    def num_hits(self, tier: Tier) -> int:
        return self._hits[tier]


class TierUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one tier of an engine; see `TierStats` and `HitWindow`."""

    num_blocks: int
    num_slots: int | None
    block_bytes: int
    num_stored: int
    stored_s: float
    num_loaded: int
    loaded_s: float
    failures: dict[str, int]
    num_hits: int
    num_skipped: int | None = None
    """None if all blocks are admitted to the tier."""


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the tiers of one engine."""

    tiers: dict[Tier, TierUsage]
    num_requested: int
    """Blocks of recent prompts."""
    num_tokens: int
    """Prompt tokens whose KV was onboarded."""
    num_declined: int
    num_dropped: int
    num_served: int | None = None
    """Blocks served to other workers; None if it serves none."""


def usage_of(host: HostTier, hits: HitWindow) -> dict[Tier, TierUsage]:
    skipped, usages = host.num_skipped, {}
    for tier, stats in host.stats.items():
        num_blocks, num_slots = host.size(tier)
        usages[tier] = TierUsage(
            num_blocks=num_blocks,
            num_slots=num_slots,
            block_bytes=host.shape_in(tier).block_bytes,
            num_stored=stats.num_stored,
            stored_s=stats.stored_s,
            num_loaded=stats.num_loaded,
            loaded_s=stats.loaded_s,
            failures=stats.failures,
            num_hits=hits.num_hits(tier),
            num_skipped=skipped.get(tier),
        )
    return usages


class TierMetrics(Collector):
    """Sums over all engines; no metrics without any."""

    def __init__(self, reports: Callable[[], Sequence[TierReport]]) -> None:
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        reports = self._reports()
        if not reports:
            return
        usages = {tier: [each.tiers[tier] for each in reports if tier in each.tiers] for tier in _TIERS}
        used = {tier: every for tier, every in usages.items() if every}
        num_requested = sum(each.num_requested for each in reports)

        def hit_rate(every: list[TierUsage]) -> float:
            return sum(each.num_hits for each in every) / num_requested if num_requested else 0.0

        for name, text, value in (
            ("blocks", "KV blocks in the tier", _num_blocks),
            ("capacity_blocks", "Capacity of the tier in KV blocks", _num_slots),
            ("utilization_ratio", "Fraction of the tier's capacity in use, from 0 to 1", _utilization),
            ("bytes", "Bytes of the KV blocks in the tier", _num_bytes),
            ("hit_rate", "Fraction of recent prompt blocks loaded from the tier", hit_rate),
        ):
            gauge = GaugeMetricFamily(f"kvolt_tier_{name}", text, labels=("tier",))
            for tier, every in used.items():
                if (number := value(every)) is not None:
                    gauge.add_metric((tier,), number)
            yield gauge
        yield from _moves(used)
        yield from _totals(reports)


def _num_blocks(every: list[TierUsage]) -> int:
    return sum(each.num_blocks for each in every)


def _num_slots(every: list[TierUsage]) -> int | None:
    slots = [each.num_slots for each in every if each.num_slots is not None]
    return sum(slots) if len(slots) == len(every) else None


def _utilization(every: list[TierUsage]) -> float | None:
    num_slots = _num_slots(every)
    return None if num_slots is None else _num_blocks(every) / max(num_slots, 1)


def _num_bytes(every: list[TierUsage]) -> int:
    return sum(each.num_blocks * each.block_bytes for each in every)


def _moves(used: Mapping[Tier, list[TierUsage]]) -> Iterator[Metric]:
    skipped = "KV blocks not stored because they were used less often than disk_touches or object_touches"
    for name, text, attribute in (
        ("stored_blocks", "KV blocks stored in the tier", "num_stored"),
        ("stored_seconds", "Time to store KV blocks in the tier", "stored_s"),
        ("loaded_blocks", "KV blocks loaded from the tier", "num_loaded"),
        ("loaded_seconds", "Time to load KV blocks from the tier", "loaded_s"),
        ("skipped_blocks", skipped, "num_skipped"),
    ):
        family = CounterMetricFamily(f"kvolt_tier_{name}", text, labels=("tier",))
        for tier, every in used.items():
            counts = [count for each in every if (count := getattr(each, attribute)) is not None]
            if counts:
                family.add_metric((tier,), sum(counts))
        yield family
    failures = CounterMetricFamily(
        "kvolt_tier_failures",
        "KV blocks that could not be stored, or failed their checksum when loaded",
        labels=("tier", "reason"),
    )
    for tier, every in used.items():
        by_reason: Counter[str] = Counter()
        for each in every:
            by_reason.update(each.failures)  # a sum of counters would drop counts of 0
        for reason, count in sorted(by_reason.items()):
            failures.add_metric((tier, reason), count)
    yield failures


def _totals(reports: Sequence[TierReport]) -> Iterator[Metric]:
    served = [each.num_served for each in reports if each.num_served is not None]
    declined = "KV blocks found in a tier and recomputed because that was predicted to be faster"
    dropped = "KV blocks evicted from host memory before they were written to a lower tier"
    for name, text, value in (
        ("served_blocks", "KV blocks served to other workers", sum(served) if served else None),
        (
            "matched_tokens",
            "Prompt tokens whose KV came from a tier",
            sum(each.num_tokens for each in reports),
        ),
        ("declined_blocks", declined, sum(each.num_declined for each in reports)),
        ("dropped_blocks", dropped, sum(each.num_dropped for each in reports)),
    ):
        yield CounterMetricFamily(f"kvolt_tier_{name}", text, value)
