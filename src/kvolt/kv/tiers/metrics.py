"""The KV tiers of a process's workers, for Prometheus: under our names, and those that Dynamo's dashboards know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.hit_window import HitWindow
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.peer_server import PeerGiving
from kvolt.kv.tiers.peer_tier import PeerTier

_TIERS = (Tier.HOST, Tier.DISK, Tier.OBJECT, Tier.PEER)


class MeteredTiers(Protocol):
    """The tiers of one engine, as far as metrics read them."""

    @property
    def cache(self) -> TieredCache: ...
    @property
    def peers(self) -> tuple[PeerTier, PeerGiving] | None: ...
    @property
    def hits(self) -> HitWindow: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_declined(self) -> int: ...


class TierMetrics(Collector):
    """Of all of them together; nothing where there are none."""

    def __init__(self, tierings: Callable[[], Sequence[MeteredTiers]]) -> None:
        self._tierings = tierings

    def collect(self) -> Iterator[Metric]:
        every = self._tierings()
        if not every:
            return
        yield from self._sizes(every)
        yield from self._moves(every)
        yield from self._dynamo(every)

    def _sizes(self, every: Sequence[MeteredTiers]) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("kvolt_tier_blocks", "KV blocks that can be found there", labels=("tier",))
        slots = GaugeMetricFamily(
            "kvolt_tier_capacity_blocks", "KV blocks that it can hold", labels=("tier",)
        )
        used = GaugeMetricFamily("kvolt_tier_bytes", "Bytes of the blocks there", labels=("tier",))
        rates = GaugeMetricFamily(
            "kvolt_tier_hit_rate",
            "Of the prompt blocks asked for lately, those that came from there",
            labels=("tier",),
        )
        for tier in _TIERS:
            hosts = [each.cache.host for each in every if tier in each.cache.host.stats]
            if not hosts:
                continue
            sizes = [each.size(tier) for each in hosts]
            blocks.add_metric((tier,), sum(count for count, _ in sizes))
            if all(most is not None for _, most in sizes):
                slots.add_metric((tier,), sum(most or 0 for _, most in sizes))
            num_bytes = (each.size(tier)[0] * each.shape_in(tier).block_bytes for each in hosts)
            used.add_metric((tier,), sum(num_bytes))
            rates.add_metric((tier,), _hit_rate(every, tier))
        yield from (blocks, slots, used, rates)

    def _moves(self, every: Sequence[MeteredTiers]) -> Iterator[Metric]:
        for name, text, attribute in (
            ("stored_blocks", "KV blocks written there", "num_stored"),
            ("stored_seconds", "Time that took", "stored_s"),
            ("loaded_blocks", "KV blocks read from there", "num_loaded"),
            ("loaded_seconds", "Time that took", "loaded_s"),
        ):
            family = CounterMetricFamily(f"kvolt_tier_{name}", text, labels=("tier",))
            for tier in _TIERS:
                stats = _stats(every, tier)
                if stats:
                    family.add_metric((tier,), sum(getattr(each, attribute) for each in stats))
            yield family
        failures = CounterMetricFamily(
            "kvolt_tier_failures",
            "KV blocks that could not be kept or were not what they were",
            labels=("tier", "reason"),
        )
        for tier in _TIERS:
            stats = _stats(every, tier)
            for reason in sorted({reason for each in stats for reason in each.failures}):
                failures.add_metric((tier, reason), sum(each.failures[reason] for each in stats))
        yield failures
        given = CounterMetricFamily(
            "kvolt_tier_given_blocks", "KV blocks that other workers were given to fetch"
        )
        givers = [each.peers[1] for each in every if each.peers is not None]
        if givers:
            given.add_metric((), sum(each.num_given for each in givers))
        yield given
        declined = CounterMetricFamily(
            "kvolt_tier_declined_blocks", "KV blocks that were computed sooner than brought"
        )
        declined.add_metric((), sum(each.num_declined for each in every))
        yield declined
        dropped = CounterMetricFamily(
            "kvolt_tier_dropped_blocks", "KV blocks that left the host before they were written below"
        )
        dropped.add_metric((), sum(each.cache.host.num_dropped for each in every))
        yield dropped
        skipped = CounterMetricFamily(
            "kvolt_tier_skipped_blocks",
            "Sightings of KV blocks that were too few (disk_touches, object_touches) to write them there",
            labels=("tier",),
        )
        for tier in _TIERS:
            counts = [each.cache.host.num_skipped for each in every]
            if any(tier in count for count in counts):
                skipped.add_metric((tier,), sum(count.get(tier, 0) for count in counts))
        yield skipped

    def _dynamo(self, every: Sequence[MeteredTiers]) -> Iterator[Metric]:
        """Its h2d is host to disk where it offloads, and host to device where it onboards."""
        host, disk, store, _ = (_stats(every, tier) for tier in _TIERS)
        for name, text, value in (
            (
                "kvbm_matched_tokens",
                "Prompt tokens whose KV came from a tier",
                sum(each.num_tokens for each in every),
            ),
            ("kvbm_offload_blocks_d2h", "Blocks from device to host", sum(each.num_stored for each in host)),
            ("kvbm_offload_blocks_h2d", "Blocks from host to disk", sum(each.num_stored for each in disk)),
            ("kvbm_onboard_blocks_h2d", "Blocks from host to device", sum(each.num_loaded for each in host)),
            ("kvbm_onboard_blocks_d2d", "Blocks from disk to device", sum(each.num_loaded for each in disk)),
            ("kvbm_offload_blocks_d2o", "Blocks to an object store", sum(each.num_stored for each in store)),
            (
                "kvbm_onboard_blocks_o2d",
                "Blocks from an object store",
                sum(each.num_loaded for each in store),
            ),
        ):
            # Not as counters, to which the library would add `_total`: dashboards know them without.
            yield UnknownMetricFamily(name, text, value)
        for tier in _TIERS:
            rate = GaugeMetricFamily(f"kvbm_{tier}_cache_hit_rate", "As kvolt_tier_hit_rate")
            rate.add_metric((), _hit_rate(every, tier))
            yield rate


def _stats(every: Sequence[MeteredTiers], tier: Tier) -> list[TierStats]:
    return [each.cache.host.stats[tier] for each in every if tier in each.cache.host.stats]


def _hit_rate(every: Sequence[MeteredTiers], tier: Tier) -> float:
    num_asked = sum(each.hits.num_asked for each in every)
    return sum(each.hits.num_hits(tier) for each in every) / num_asked if num_asked else 0.0
