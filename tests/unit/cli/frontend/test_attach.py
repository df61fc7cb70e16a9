"""`kvolt frontend --attach`: what may be written, and a frontend in front of servers that go and come."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engines.remote.fake_server import FakeServer

from kvolt.cli.frontend.attach import Attached, parse_attached
from kvolt.cli.frontend.command import configure
from kvolt.cli.process import Process, running
from kvolt.core.endpoints import InstanceState
from kvolt.core.errors import ConfigError
from kvolt.runtime.config.settings import (
    AdminSettings,
    DiscoverySettings,
    EventsSettings,
    FrontendSettings,
    Settings,
)
from kvolt.runtime.health import HealthState
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.tasks import Scope
from kvolt.testing.model_server import model_folder

BLOCKS = "kvolt_worker_kv_total_blocks{"


def written(*arguments: str) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parse_attached(parser.parse_args(arguments).attach, Settings())


def test_what_may_be_written() -> None:
    first, second = written(
        *("--attach", "http://a:8000,events=tcp://a:5557,replay=tcp://a:5558,idle_timeout_s=5"),
        *("--attach", "http://b:8000/v1", "--kv-events", "tcp://b:5557"),
    )
    waits = {"start_timeout_s": None}
    assert first == waits | {
        "url": "http://a:8000",
        "kv_events": "tcp://a:5557",
        "kv_events_replay": "tcp://a:5558",
        "idle_timeout_s": 5,
    }
    assert second == waits | {"url": "http://b:8000/v1", "kv_events": "tcp://b:5557"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ftp://a:8000", "invalid server URL"),
        ("http://a,event=tcp://a:1", "no argument 'event'"),
        ("http://a,events", "not KEY=VALUE"),
        ("http://a,events=tcp://*:1", "is not a valid endpoint"),
        ("http://a,kind=acme", "kind"),
    ],
)
def test_what_may_not(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        written("--attach", text)


def test_events_of_nobody(capsys) -> None:
    with pytest.raises(SystemExit):
        written("--kv-events", "tcp://a:1")
    assert "--attach before it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        Settings(frontend=FrontendSettings(processes=2)),
        Settings(discovery=DiscoverySettings(kind="mem")),
        Settings(events=EventsSettings(kind="mem")),
    ],
    ids=["processes", "discovery", "events"],
)
def test_settings_that_it_does_not_go_with(settings: Settings) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_attached(["http://a"], settings)
    assert caught.value.fields["remedy"]


async def states(process: Process) -> list[InstanceState]:
    found = [await part.status() for part in process.runtime.children]
    return [
        endpoint.state
        for status in found
        for endpoint in status.endpoints
        if endpoint.endpoint.endswith(".generate")
    ]


async def until(process: Process, *wanted: InstanceState) -> None:
    """Registrations are told to nobody inside: they are looked at until they are so."""
    async with asyncio.timeout(20):
        while await states(process) != list(wanted):
            await asyncio.sleep(0.01)


async def until_blocks(process: Process, num_blocks: int) -> None:
    """Of all of them, which is told a moment after one has registered."""
    async with asyncio.timeout(20):
        while not any(
            line.startswith(BLOCKS) and line.endswith(f" {num_blocks}.0")
            for line in process.metrics.render()[0].decode().splitlines()
        ):
            await asyncio.sleep(0.01)


async def test_servers_that_go_and_come(tmp_path: Path) -> None:
    settings = Settings(
        discovery=DiscoverySettings(path=str(tmp_path / "discovery"), poll_s=0.01),
        admin=AdminSettings(enabled=False),
    )
    folder = model_folder(tmp_path / "model")
    async with (
        FakeServer("vllm") as one,
        FakeServer("vllm") as two,
        running(settings, "frontend", ProcessRole.FRONTEND) as process,
    ):
        await two.stop()
        given = [
            {"url": server.url, "tokenizer": str(folder), "probe_interval_s": 0.01, "start_timeout_s": None}
            for server in (one, two)
        ]
        async with Scope("test") as scope:
            scope.start(Attached(process, given).run(), "attached")
            await until(process, InstanceState.READY)  # one that is not there keeps nobody waiting
            await two.start()
            await until(process, InstanceState.READY, InstanceState.READY)
            await until_blocks(process, 512)
            text = process.metrics.render()[0].decode()
            series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
            assert len(series) == len(set(series))
            await one.stop()
            await until(process, InstanceState.CORDONED, InstanceState.READY)
            checks = process.runtime.health.report().checks
            assert checks[f"{one.url} server"].state is HealthState.CORDONED
            assert process.runtime.health.healthy()
            await one.start()
            await until(process, InstanceState.READY, InstanceState.READY)
            scope.cancel()


async def test_unusable_server_leaves_the_others_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(
        discovery=DiscoverySettings(path=str(tmp_path / "discovery"), poll_s=0.01),
        admin=AdminSettings(enabled=False),
    )
    folder, later = model_folder(tmp_path / "model"), tmp_path / "later"

    async def described(state: str) -> dict[str, str]:
        async with asyncio.timeout(20):
            while (each := (await process.runtime.status()).details["attached"][1])["state"] != state:
                await asyncio.sleep(0.01)
        return each

    async with (
        FakeServer("vllm") as one,
        FakeServer("vllm") as two,
        running(settings, "frontend", ProcessRole.FRONTEND) as process,
    ):
        await two.stop()
        given = [
            {"url": server.url, "tokenizer": str(path), "probe_interval_s": 0.01, "start_timeout_s": None}
            for server, path in ((one, folder), (two, later))
        ]
        async with Scope("test") as scope:
            scope.start(Attached(process, given, retry_s=0.05).run(), "attached")
            await until(process, InstanceState.READY)
            assert "refused" in (await described("waiting"))["reason"]
            await two.start()
            assert "tokenizer" in (await described("failed"))["reason"]
            assert await states(process) == [InstanceState.READY]
            assert process.runtime.health.healthy()
            model_folder(later)
            await described("attached")
            await until(process, InstanceState.READY, InstanceState.READY)
            assert process.runtime.health.report().checks[f"{two.url} server"].state is HealthState.READY
            scope.cancel()
    failures = [
        text for record in caplog.records if "attached server failed" in (text := record.getMessage())
    ]
    assert len(failures) == 1  # not at every attempt
    assert two.url in failures[0]
    assert "set tokenizer=FOLDER" in failures[0]


async def test_one_that_can_never_be_attached_ends_the_process(tmp_path: Path) -> None:
    settings = Settings(
        discovery=DiscoverySettings(path=str(tmp_path / "discovery")), admin=AdminSettings(enabled=False)
    )
    async with FakeServer("vllm") as server, running(settings, "frontend", ProcessRole.FRONTEND) as process:
        with pytest.raises(ConfigError, match="tokenizer"):
            await Attached(process, [{"url": server.url, "tokenizer": "/nowhere/at/all"}] * 2).run()
