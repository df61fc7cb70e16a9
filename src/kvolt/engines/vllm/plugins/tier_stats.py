"""Metrics of vLLM's tiers: sent from vLLM's scheduler process with its step statistics, exported by kvolt's worker.

Converted to the interface that `TierMetrics` reads, so that the metrics equal those of kvolt's own engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import msgspec
from prometheus_client.core import Metric

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.metrics import TierMetrics

CONNECTOR = "KvoltTierConnector"
"""Name of its statistics when several connectors report."""


class _Source(Protocol):
    """`TierScheduler`, in vLLM's process."""

    counters: dict[Tier, Any]
    num_blocks_by_tier: Counter[Tier]
    hits: Any
    num_onboarded: int

    @property
    def num_declined(self) -> int: ...


class _TierPayload(msgspec.Struct):
    num_blocks: int = 0
    num_slots: int | None = None
    block_bytes: int = 0
    num_stored: int = 0
    stored_s: float = 0.0
    num_loaded: int = 0
    loaded_s: float = 0.0
    failures: dict[str, int] = {}
    num_hits: int = 0
    num_dropped: int = 0


class _Payload(msgspec.Struct):
    tiers: dict[Tier, _TierPayload]
    num_requested: int = 0
    num_onboarded: int = 0
    num_declined: int = 0


def stats_payload(source: _Source) -> dict[str, Any]:
    """Statistics to send; empty until the workers have reported."""
    if not source.counters:
        return {}
    tiers = {
        tier: _TierPayload(
            num_blocks=source.num_blocks_by_tier[tier],
            num_slots=each.num_slots,
            block_bytes=each.block_bytes,
            num_stored=each.num_stored,
            stored_s=each.stored_s,
            num_loaded=each.num_loaded,
            loaded_s=each.loaded_s,
            failures=each.failures,
            num_hits=source.hits.num_hits(tier),
            num_dropped=each.num_dropped,
        )
        for tier, each in source.counters.items()
    }
    payload = _Payload(tiers, source.hits.num_requested, source.num_onboarded, source.num_declined)
    return cast("dict[str, Any]", msgspec.to_builtins(payload))


class VllmTierMetrics:
    """Collector over all ranks of one vLLM; empty without tiers."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._metrics = TierMetrics(lambda: cast(Any, list(self._ranks.values())))

    def update(self, rank: int, statistics: Mapping[str, Any] | None, block_size: int) -> None:
        """Set the statistics of a rank, as reported by one connector or by several."""
        if not statistics:
            return
        try:
            payload = msgspec.convert(statistics.get(CONNECTOR, statistics), _Payload)
        except msgspec.ValidationError:
            return  # of another connector
        self._ranks[rank] = _Rank(payload, block_size)

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


class _Rank:
    """The part of `Tiering` that `TierMetrics` reads."""

    peers = None

    def __init__(self, payload: _Payload, block_size: int) -> None:
        self._payload = payload
        self.num_declined = payload.num_declined
        self.num_tokens = payload.num_onboarded * block_size
        self.cache = self.host = self.hits = self
        self.num_requested = payload.num_requested
        self.num_dropped = sum(each.num_dropped for each in payload.tiers.values())
        self.num_skipped: dict[Tier, int] = {}
        self.stats = {
            tier: TierStats(
                num_stored=each.num_stored,
                num_loaded=each.num_loaded,
                stored_s=each.stored_s,
                loaded_s=each.loaded_s,
                failures=Counter(each.failures),
            )
            for tier, each in payload.tiers.items()
        }

    def size(self, tier: Tier) -> tuple[int, int | None]:
        return self._payload.tiers[tier].num_blocks, self._payload.tiers[tier].num_slots

    def shape_in(self, tier: Tier) -> _TierPayload:
        """Has `block_bytes`."""
        return self._payload.tiers[tier]

    def num_hits(self, tier: Tier) -> int:
        return self._payload.tiers[tier].num_hits if tier in self._payload.tiers else 0
