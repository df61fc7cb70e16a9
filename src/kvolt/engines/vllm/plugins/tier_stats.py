"""Metrics of vLLM's tiers: sent from vLLM's scheduler process with its step statistics, exported by kvolt's worker.

As `TierReport`, so that the metrics equal those of kvolt's own engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace
from prometheus_client.core import Metric

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.metrics import TierMetrics, TierReport, TierUsage

CONNECTOR = "KvoltTierConnector"
"""Name of its statistics when several connectors report."""


class TierCounters(msgspec.Struct, frozen=True):
    """Counters of one tier since the workers started."""

    num_stored: int = 0
    stored_s: float = 0.0
    num_loaded: int = 0
    loaded_s: float = 0.0
    failures: dict[str, int] = {}
    """Failed blocks, by reason."""
    block_s: float = 0.0
    """Recent time to load a block."""
    num_slots: int | None = None
    block_bytes: int = 0
    num_dropped: int = 0
    """Blocks evicted from the host tier before they were written to disk."""

    def combine(self, other: TierCounters) -> TierCounters:
        """Combine two workers: each has a piece of every block, and the slower one decides."""
        numbers = {
            name: max(getattr(self, name), getattr(other, name))
            for name in ("num_stored", "stored_s", "num_loaded", "loaded_s", "block_s", "num_dropped")
        }
        failures = Counter(self.failures) | Counter(other.failures)
        return replace(self, **numbers, failures=dict(failures))


class TierPayload(TierCounters, frozen=True):
    """Counters of a tier and of its use."""

    num_blocks: int = 0
    num_hits: int = 0


class TiersPayload(msgspec.Struct):
    """Statistics of all tiers, as sent."""

    tiers: dict[Tier, TierPayload]
    num_requested: int = 0
    num_onboarded: int = 0
    num_declined: int = 0


class VllmTierMetrics:
    """Collector over all ranks of one vLLM; empty without tiers."""

    def __init__(self) -> None:
        self._ranks: dict[int, TierReport] = {}
        self._metrics = TierMetrics(lambda: list(self._ranks.values()))

    def update(self, rank: int, statistics: Mapping[str, Any] | None, block_size: int) -> None:
        """Set the statistics of a rank, as reported by one connector or by several."""
        if not statistics:
            return
        try:
            payload = msgspec.convert(statistics.get(CONNECTOR, statistics), TiersPayload)
        except msgspec.ValidationError:
            return  # of another connector
        self._ranks[rank] = TierReport(
            tiers={
                tier: msgspec.convert(each, TierUsage, from_attributes=True)
                for tier, each in payload.tiers.items()
            },
            num_requested=payload.num_requested,
            num_tokens=payload.num_onboarded * block_size,
            num_declined=payload.num_declined,
            num_dropped=sum(each.num_dropped for each in payload.tiers.values()),
        )

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()
