"""Tiers as flags and settings say them."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.unit.worker.kv.test_tiering import tiered

from kvolt.cli.main import main
from kvolt.cli.worker.tier_settings import with_tiers
from kvolt.cli.worker.tiers import resize_tiers, tiering_of
from kvolt.core.errors import ConfigError, InvalidRequest, Unsupported
from kvolt.core.kv_events import Tier
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec, features_of
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.runtime.config.settings import TierSettings, WorkerSettings
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.paths import nixl_library


def flags(**given: str | bool) -> argparse.Namespace:
    names = ("kv_host", "kv_disk", "kv_disk_dir", "kv_disk_direct", "kv_object", "kv_pool", "kv_peers")
    return argparse.Namespace(**{**dict.fromkeys(names), **given})


def test_flags_come_before_the_config() -> None:
    group = WorkerSettings(tiers=TierSettings(host="1GiB", disk="5GiB"))
    assert with_tiers(group, flags(kv_host="2GiB")).tiers == TierSettings(host="2GiB", disk="5GiB")
    assert with_tiers(group, flags()) == group


def test_a_size_that_is_none_is_told_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="invalid tier size: 'plenty'"):
        with_tiers(WorkerSettings(), flags(kv_disk="plenty"))


def test_marks_and_forms_that_cannot_be_are_told_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="host_high_water is 0"):
        with_tiers(WorkerSettings(tiers=TierSettings(host_high_water=0.9)), flags())
    with pytest.raises(ConfigError, match="watermarks"):
        with_tiers(WorkerSettings(tiers=TierSettings(disk_low_water=0.1)), flags(kv_disk="1GiB"))
    packed = TierSettings(disk="1GiB", disk_compression="fp8", disk_direct=True)
    with pytest.raises(ConfigError, match="--kv-disk-compression are mutually"):
        with_tiers(WorkerSettings(tiers=packed), flags())


def test_flags_say_how_blocks_lie_on_a_disk() -> None:
    said = with_tiers(WorkerSettings(), flags(kv_disk="1GiB", kv_disk_compression="fp8"))
    assert said.tiers.disk_compression == "fp8"


def test_without_sizes_there_are_none() -> None:
    assert tiering_of(TierSettings(), no_agent) is None


def no_agent() -> TransferAgent:
    raise AssertionError("nobody gives anything to others")


def test_workers_that_share_need_something_to_share() -> None:
    with pytest.raises(ConfigError, match="--kv-peers requires a host tier"):
        with_tiers(WorkerSettings(), flags(kv_peers=True))
    with pytest.raises(ConfigError, match="mutually exclusive"):
        with_tiers(WorkerSettings(), flags(kv_host="1GiB", kv_peers=True, kv_pool="/s"))
    assert with_tiers(WorkerSettings(), flags(kv_host="1GiB", kv_peers=True)).tiers.peers


@pytest.mark.parametrize("shared", [{"kv_object": "s3://b/kv"}, {"kv_peers": True}, {"kv_pool": "/s"}])
def test_what_is_not_exact_is_not_for_others(shared: dict[str, str | bool]) -> None:
    group = WorkerSettings(tiers=TierSettings(host="1GiB", disk="5GiB", disk_compression="fp8"))
    assert with_tiers(group, flags()) == group
    with pytest.raises(ConfigError, match="is lossy"):
        with_tiers(group, flags(**shared))


def test_what_comes_straight_from_a_disk_needs_one_and_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="requires a disk tier"):
        with_tiers(WorkerSettings(), flags(kv_host="1GiB", kv_disk_direct=True))
    assert with_tiers(WorkerSettings(), flags(kv_disk="1GiB", kv_disk_direct=True)).tiers.disk_direct
    monkeypatch.setattr(nixl_library, "_NAMES", ("missing_nixl",))
    with pytest.raises(ConfigError, match="not installed"):
        with_tiers(WorkerSettings(), flags(kv_disk="1GiB", kv_disk_direct=True))


async def test_other_workers_come_before_a_store_and_after_a_disk(tmp_path: Path) -> None:
    engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), SimArguments())
    started = replace(await engine.start(), features=features_of(engine))
    agent = TransferAgent()
    tiers = TierSettings(
        host="100blocks", disk="100blocks", disk_dir=str(tmp_path), object=str(tmp_path / "store"), peers=True
    )
    new = tiering_of(tiers, lambda: agent)
    assert new is not None
    tiering = new(engine, started, time.monotonic, lambda changes: None)
    assert [each.tier for each in tiering.cache.host.lower] == [Tier.DISK, Tier.PEER, Tier.OBJECT]
    assert tiering.peers is not None
    await tiering.start()
    await tiering.close()
    agent.close()
    await engine.close()


async def refusal(tiers: TierSettings, **info: object) -> ConfigError:
    engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), SimArguments())
    started = await engine.start()
    new = tiering_of(tiers, no_agent)
    assert new is not None
    with pytest.raises(ConfigError) as told:
        new(
            engine,
            replace(started, **{"features": features_of(engine), **info}),
            time.monotonic,
            lambda changes: None,
        )
    await engine.close()
    return told.value


@pytest.mark.parametrize(("size", "warns"), [("4000TiB", True), ("100blocks", False)])
async def test_a_disk_tier_larger_than_the_free_space_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: str, warns: bool
) -> None:
    engine = SimEngine(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), SimArguments())
    started = replace(await engine.start(), features=features_of(engine))
    new = tiering_of(TierSettings(host="100blocks", disk=size, disk_dir=str(tmp_path)), no_agent)
    assert new is not None
    tiering = new(engine, started, time.monotonic, lambda changes: None)
    await tiering.start()
    assert ("disk tier larger than the free space: size=4096000.0GiB free=" in caplog.text) is warns
    await tiering.close()
    await engine.close()


async def test_what_cannot_be_is_told_with_a_remedy(tmp_path: Path) -> None:
    assert (
        "does not support KV tiers"
        in (await refusal(TierSettings(host="1GiB"), features=("KvEvents",))).message
    )
    assert "would hold" in (await refusal(TierSettings(host="1B"))).message
    assert "GiB are free" in (await refusal(TierSettings(host="4000TiB"))).message
    where = str(tmp_path / "kv")
    packed = await refusal(TierSettings(disk="1GiB", disk_dir=where, disk_compression="fp8"))
    assert "its dtype is sim; supported: float32" in packed.message
    assert "remove disk_compression" in packed.fields["remedy"]
    assert "would hold 0 blocks" in (await refusal(TierSettings(disk="1B", disk_dir=where))).message
    (tmp_path / "file").touch()
    told = await refusal(TierSettings(disk="1GiB", disk_dir=str(tmp_path / "file")))
    assert "cannot store blocks in" in told.message
    assert told.fields["remedy"]


def test_what_tiers_would_find_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "small.jsonl")
    assert main(["trace", "make", path, "--recipe", "small"]) == 0
    capsys.readouterr()
    assert main(["trace", "analyze", path, "--tiers", "host=50blocks,disk=100000blocks", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    host, disk = found["tiers"]
    assert host["share"] > 0
    assert found["share"] == pytest.approx(host["share"] + disk["share"])
    assert found["share"] <= found["best_share"]
    assert main(["trace", "analyze", path, "--tiers", "host=1GiB"]) == 0
    assert "at best" in capsys.readouterr().out
    assert main(["trace", "analyze", path, "--tiers", "host=1B"]) == 2
    assert "holds no block" in capsys.readouterr().err


async def test_tiers_are_resized_by_command(tmp_path: Path) -> None:
    async with tiered(folder=tmp_path) as at:
        told = await resize_tiers(at.tiering, b'{"host": "128blocks", "disk": "300blocks"}')
        assert told["host"]["capacity_blocks"] == 128
        assert told["disk"]["capacity_blocks"] == 300
        assert (await resize_tiers(at.tiering, b""))["host"]["capacity_blocks"] == 128, "nothing named stays"
        assert (await resize_tiers(at.tiering, b'{"host": "3x"}'))["host"]["capacity_blocks"] == 3 * 24
        for body, reason in (
            (b'{"host": "lots"}', "invalid tier size"),
            (b'{"host": "100TiB"}', "GiB are free"),
            (b'{"disk": "1blocks"}', "would hold 1 blocks"),
            (b'{"tape": "1GiB"}', "tape"),
            (b"not json", "for example"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await resize_tiers(at.tiering, body)
    with pytest.raises(Unsupported):
        await resize_tiers(None, b"{}")
