"""Prometheus metrics of the KV tiers of a process's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.hit_window import HitWindow
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.peer_server import PeerServer
from kvolt.kv.tiers.peer_tier import PeerTier

_TIERS = (Tier.HOST, Tier.DISK, Tier.OBJECT, Tier.PEER)


class MeteredTiers(Protocol):
    """Tiers of one engine as read by metrics."""

    @property
    def cache(self) -> TieredCache: ...
    @property
    def peers(self) -> tuple[PeerTier, PeerServer] | None: ...
    @property
    def hits(self) -> HitWindow: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_declined(self) -> int: ...


class TierMetrics(Collector):
    """Sums over all engines; no metrics without any."""

    def __init__(self, engines: Callable[[], Sequence[MeteredTiers]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        if not engines:
            return
        yield from self._sizes(engines)
        yield from self._moves(engines)

    def _sizes(self, engines: Sequence[MeteredTiers]) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("kvolt_tier_blocks", "KV blocks in the tier", labels=("tier",))
        slots = GaugeMetricFamily(
            "kvolt_tier_capacity_blocks", "Capacity of the tier in KV blocks", labels=("tier",)
        )
        utilization = GaugeMetricFamily(
            "kvolt_tier_utilization_ratio",
            "Fraction of the tier's capacity in use, from 0 to 1",
            labels=("tier",),
        )
        used = GaugeMetricFamily("kvolt_tier_bytes", "Bytes of the KV blocks in the tier", labels=("tier",))
        rates = GaugeMetricFamily(
            "kvolt_tier_hit_rate",
            "Fraction of recent prompt blocks loaded from the tier",
            labels=("tier",),
        )
        for tier in _TIERS:
            hosts = [each.cache.host for each in engines if tier in each.cache.host.stats]
            if not hosts:
                continue
            sizes = [each.size(tier) for each in hosts]
            num_blocks = sum(count for count, _ in sizes)
            blocks.add_metric((tier,), num_blocks)
            if all(capacity is not None for _, capacity in sizes):
                total = sum(capacity or 0 for _, capacity in sizes)
                slots.add_metric((tier,), total)
                utilization.add_metric((tier,), num_blocks / total if total else 0.0)
            num_bytes = (each.size(tier)[0] * each.shape_in(tier).block_bytes for each in hosts)
            used.add_metric((tier,), sum(num_bytes))
            rates.add_metric((tier,), _hit_rate(engines, tier))
        yield from (blocks, slots, utilization, used, rates)

    def _moves(self, engines: Sequence[MeteredTiers]) -> Iterator[Metric]:
        for name, text, attribute in (
            ("stored_blocks", "KV blocks stored in the tier", "num_stored"),
            ("stored_seconds", "Time to store KV blocks in the tier", "stored_s"),
            ("loaded_blocks", "KV blocks loaded from the tier", "num_loaded"),
            ("loaded_seconds", "Time to load KV blocks from the tier", "loaded_s"),
        ):
            family = CounterMetricFamily(f"kvolt_tier_{name}", text, labels=("tier",))
            for tier in _TIERS:
                stats = _stats(engines, tier)
                if stats:
                    family.add_metric((tier,), sum(getattr(each, attribute) for each in stats))
            yield family
        failures = CounterMetricFamily(
            "kvolt_tier_failures",
            "KV blocks that could not be stored, or failed their checksum when loaded",
            labels=("tier", "reason"),
        )
        for tier in _TIERS:
            stats = _stats(engines, tier)
            for reason in sorted({reason for each in stats for reason in each.failures}):
                failures.add_metric((tier, reason), sum(each.failures.get(reason, 0) for each in stats))
        yield failures
        served = CounterMetricFamily("kvolt_tier_served_blocks", "KV blocks served to other workers")
        servers = [each.peers[1] for each in engines if each.peers is not None]
        if servers:
            served.add_metric((), sum(each.num_served for each in servers))
        yield served
        matched = CounterMetricFamily("kvolt_tier_matched_tokens", "Prompt tokens whose KV came from a tier")
        matched.add_metric((), sum(each.num_tokens for each in engines))
        yield matched
        declined = CounterMetricFamily(
            "kvolt_tier_declined_blocks",
            "KV blocks found in a tier and recomputed because that was predicted to be faster",
        )
        declined.add_metric((), sum(each.num_declined for each in engines))
        yield declined
        dropped = CounterMetricFamily(
            "kvolt_tier_dropped_blocks",
            "KV blocks evicted from host memory before they were written to a lower tier",
        )
        dropped.add_metric((), sum(each.cache.host.num_dropped for each in engines))
        yield dropped
        skipped = CounterMetricFamily(
            "kvolt_tier_skipped_blocks",
            "KV blocks not stored because they were used less often than disk_touches or object_touches",
            labels=("tier",),
        )
        for tier in _TIERS:
            counts = [each.cache.host.num_skipped for each in engines]
            if any(tier in count for count in counts):
                skipped.add_metric((tier,), sum(count.get(tier, 0) for count in counts))
        yield skipped


def _stats(engines: Sequence[MeteredTiers], tier: Tier) -> list[TierStats]:
    return [each.cache.host.stats[tier] for each in engines if tier in each.cache.host.stats]


def _hit_rate(engines: Sequence[MeteredTiers], tier: Tier) -> float:
    num_requested = sum(each.hits.num_requested for each in engines)
    return sum(each.hits.num_hits(tier) for each in engines) / num_requested if num_requested else 0.0
