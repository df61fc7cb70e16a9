"""The figures of a vLLM's tiers, from its scheduler's process to the metrics of the worker that has it.

They travel with vLLM's statistics of a step, as data. Here they get the shape that `TierMetrics` reads, so that these
tiers have the same metrics as those of kvolt's own engine.
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
"""Under this name its statistics are found among others'."""


class _Source(Protocol):
    """`TierScheduler`, which is another process's."""

    figures: dict[Tier, Any]
    num_there: Counter[Tier]
    hits: Any
    num_brought: int

    @property
    def num_declined(self) -> int: ...


class _TierSays(msgspec.Struct):
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


class _Says(msgspec.Struct):
    tiers: dict[Tier, _TierSays]
    num_asked: int = 0
    num_brought: int = 0
    num_declined: int = 0


def figures_payload(source: _Source) -> dict[str, Any]:
    """Empty as long as the workers have said nothing."""
    if not source.figures:
        return {}
    tiers = {
        tier: _TierSays(
            num_blocks=source.num_there[tier],
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
        for tier, each in source.figures.items()
    }
    says = _Says(tiers, source.hits.num_asked, source.num_brought, source.num_declined)
    return cast("dict[str, Any]", msgspec.to_builtins(says))


class VllmTierMetrics:
    """Of all ranks of a vLLM together. Nothing where it has no tiers."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._metrics = TierMetrics(lambda: cast(Any, list(self._ranks.values())))

    def take(self, rank: int, statistics: Mapping[str, Any] | None, block_size: int) -> None:
        """A vLLM's connectors' own, as one or several of them tell."""
        if not statistics:
            return
        given = statistics.get(CONNECTOR, statistics)
        try:
            says = msgspec.convert(given, _Says)
        except msgspec.ValidationError:
            return  # another connector's
        self._ranks[rank] = _Rank(says, block_size)

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


class _Rank:
    """As a `Tiering` looks to who reads its figures."""

    peers = None

    def __init__(self, says: _Says, block_size: int) -> None:
        self._says = says
        self.num_declined = says.num_declined
        self.num_tokens = says.num_brought * block_size
        self.cache = self.host = self.hits = self
        self.num_asked = says.num_asked
        self.num_dropped = sum(each.num_dropped for each in says.tiers.values())
        self.num_skipped: dict[Tier, int] = {}
        self.stats = {
            tier: TierStats(
                num_stored=each.num_stored,
                num_loaded=each.num_loaded,
                stored_s=each.stored_s,
                loaded_s=each.loaded_s,
                failures=Counter(each.failures),
            )
            for tier, each in says.tiers.items()
        }

    def size(self, tier: Tier) -> tuple[int, int | None]:
        return self._says.tiers[tier].num_blocks, self._says.tiers[tier].num_slots

    def shape_in(self, tier: Tier) -> _TierSays:
        """Which says how many bytes a block there has."""
        return self._says.tiers[tier]

    def num_hits(self, tier: Tier) -> int:
        return self._says.tiers[tier].num_hits if tier in self._says.tiers else 0
