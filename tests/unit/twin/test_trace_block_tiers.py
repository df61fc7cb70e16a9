"""Tiers in a twin: found again in virtual time, by the code of real workers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvolt.bench.traces import small_trace
from kvolt.cli.main import main
from kvolt.core.kv_events import Tier
from kvolt.engines.sim.engine import SimArguments
from kvolt.twin.cluster import TwinSettings
from kvolt.twin.replay import TwinRun, new_tally
from kvolt.twin.trace_block_tiers import TwinTiers

SMALL = TwinSettings(engine=SimArguments(kv_blocks=150), num_workers=2)


def run(settings: TwinSettings) -> TwinRun:
    done = TwinRun(settings, new_tally(settings))
    done.run(small_trace())
    return done


@pytest.mark.parametrize("router", ["latency", "round-robin"])
def test_what_left_a_device_is_found_below_it(router: str) -> None:
    plain = run(replace(SMALL, router=router))
    host = run(replace(SMALL, router=router, tiers=TwinTiers(host_blocks=20_000)))
    assert host.tally.cached_tokens > 1.1 * plain.tally.cached_tokens
    assert host.watch.onboarded_tokens[Tier.HOST] > 0
    assert plain.watch.onboarded_tokens.total() == 0


def test_a_disk_has_what_the_host_has_no_room_for() -> None:
    tiers = TwinTiers(host_blocks=40, disk_blocks=50_000, disk_bytes_per_s=20e9)
    both = run(replace(SMALL, tiers=tiers))
    assert both.watch.onboarded_tokens[Tier.DISK] > 0
    again = run(replace(SMALL, tiers=tiers))
    assert again.tally.cached_tokens == both.tally.cached_tokens, "a seed gives the same again"


def test_what_cannot_be_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--kv-disk", "100blocks"]) == 2
    assert "disk_blocks requires host_blocks" in capsys.readouterr().err
    assert main(["twin", "--kv-host", "100blocks", "--kv-eviction", "mru"]) == 2
    assert "mru" in capsys.readouterr().err
    assert main(["twin", "--kv-host", "lots"]) == 2
    assert "invalid tier size" in capsys.readouterr().err


def test_the_report_tells_tiers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--arg", "kv_blocks=700", "--kv-host", "20x", "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "hit rate, device" in told
    assert "hit rate, host" in told
