"""What Prometheus is told of tiers."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.worker.kv.test_tiering import request, tiered, until_offloaded

from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.metrics import HitWindow, TierMetrics


async def test_moved_and_stored_blocks_are_reported(tmp_path: Path) -> None:
    async with tiered(folder=tmp_path) as at:
        registry = CollectorRegistry()
        registry.register(TierMetrics(lambda: [at.tiering.report()]))
        await at.answer(request("first", 10))
        await until_offloaded(at, 8)
        await at.engine.clear_kv()
        await at.answer(request("again", 10))
        at.cache.host.stats[Tier.DISK].failures["corrupt"] += 1
        at.cache.host.stats[Tier.DISK].failures["gone"] += 0
        told = generate_latest(registry).decode()
    for line in (
        'kvolt_tier_blocks{tier="host"} 8.0',
        'kvolt_tier_capacity_blocks{tier="host"} 64.0',
        'kvolt_tier_stored_blocks_total{tier="host"} 8.0',
        'kvolt_tier_loaded_blocks_total{tier="host"} 8.0',
        'kvolt_tier_failures_total{reason="corrupt",tier="disk"} 1.0',
        'kvolt_tier_failures_total{reason="gone",tier="disk"} 0.0',
        "kvolt_tier_matched_tokens_total 128.0",
        'kvolt_tier_hit_rate{tier="host"} 0.5',
        'kvolt_tier_utilization_ratio{tier="host"} 0.125',
    ):
        assert line in told, told
    dashboard = (Path(__file__).parents[4] / "deploy" / "grafana" / "kv-tiers.json").read_text()
    shown = set(re.findall(r"\bkvolt_tier_\w+", dashboard))
    assert len(shown) > 8
    missing = {name for name in shown if f"\n{name}{{" not in told and f"\n{name} " not in told}
    assert not missing, "a dashboard shows a missing metric"


def test_without_tiers_nothing_is_reported() -> None:
    assert list(TierMetrics(lambda: []).collect()) == []


def test_hits_are_those_of_the_last_prompts() -> None:
    window = HitWindow(2)
    window.add(10, ((Tier.HOST, 4),))
    window.add(10, ())
    assert (window.num_requested, window.num_hits(Tier.HOST)) == (20, 4)
    window.add(30, ((Tier.DISK, 6),))
    assert (window.num_requested, window.num_hits(Tier.HOST), window.num_hits(Tier.DISK)) == (40, 0, 6)
