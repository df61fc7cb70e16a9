"""Many sim workers in one process: each by itself to others, one process to its operator."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.unit.engines.lab import ARGUMENTS, make_request, sim

from kvolt.cli import process
from kvolt.cli.process import Process, running
from kvolt.cli.worker.command import check_engine
from kvolt.cli.worker.fleet import WorkerFleet
from kvolt.core.delta import Delta
from kvolt.core.endpoints import KV_TOPIC, LOAD_TOPIC, Instance, InstanceState, decode_instance
from kvolt.core.errors import ConfigError, DiscoveryLost, EngineDied
from kvolt.core.kv_events import KvEventBatch
from kvolt.core.load import LoadReport
from kvolt.runtime.config.settings import Settings, WorkerSettings
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.health import HealthState
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.tasks import Scope
from kvolt.worker.worker import WorkerOptions

COUNT = 24
LIMITS = Deadlines(connect_s=5.0, first_s=20.0, between_s=20.0, total_s=60.0)
SETTINGS = msgspec.convert(
    {
        "discovery": {"kind": "mem"},
        "events": {"kind": "mem"},
        "admin": {"enabled": False},
        "runtime": {"drain_timeout_s": 5.0},
    },
    Settings,
)

_decode_delta = msgspec.msgpack.Decoder(Delta).decode


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@asynccontextmanager
async def fleet_of(count: int, settings: Settings = SETTINGS) -> AsyncIterator[tuple[Process, WorkerFleet]]:
    async with running(settings, "sim", ProcessRole.WORKER) as process:
        arguments = msgspec.structs.replace(ARGUMENTS, speed=20.0)
        fleet = WorkerFleet(process, lambda: sim(arguments), WorkerOptions(), count)
        try:
            await fleet.start()
            async with Scope("fleet") as scope:
                scope.start(fleet.run(), "run")
                yield process, fleet
                scope.cancel()
        finally:
            await fleet.close()


async def registered(runtime: Runtime) -> list[Instance]:
    content = await runtime.discovery.get_prefix("instances/")
    found = [decode_instance(value) for value in content.values()]
    return [one for one in found if one is not None and one.endpoint.endpoint == "generate"]


async def ask(runtime: Runtime, instance: Instance, name: str, tokens: int = 3) -> int:
    """How many tokens came from exactly this worker."""
    to = Destination(instance.address, instance.target)
    request = make_request(name, tokens=tokens)
    count = 0
    async with await open_stream(runtime.plane, to, request, LIMITS, _decode_delta) as stream:
        async for delta in stream:
            count += len(delta.token_ids)
    return count


async def test_each_worker_is_registered_reached_and_heard_by_itself() -> None:
    async with fleet_of(COUNT) as (process, fleet):
        runtime = process.runtime
        instances = await registered(runtime)
        assert len({one.id for one in instances}) == COUNT
        assert len({one.address for one in instances}) == COUNT
        assert {one.process for one in instances} == {f"sim-{number}" for number in range(COUNT)}
        loads, blocks = runtime.events.subscribe(LOAD_TOPIC), runtime.events.subscribe(KV_TOPIC)
        told = await asyncio.gather(*(ask(runtime, one, f"r-{one.id}", tokens=30) for one in instances))
        assert told == [30] * COUNT
        assert [worker.metrics.hit_rate for worker in fleet.workers] == [0.0] * COUNT
        heard: set[str] = set()
        stored: Counter[str] = Counter()
        async with asyncio.timeout(10):
            while len(heard) < COUNT:
                heard.add(msgspec.msgpack.decode((await anext(loads)).payload, type=LoadReport).instance)
            while len(stored) < COUNT:
                batch = msgspec.msgpack.decode((await anext(blocks)).payload, type=KvEventBatch)
                stored[str(batch.instance)] += 1
        assert heard == set(stored) == {one.id for one in instances}


async def test_metrics_are_those_of_all_workers_and_no_series_is_told_twice() -> None:
    async with fleet_of(3) as (process, _):
        instances = await registered(process.runtime)
        for number, one in enumerate(instances):
            for turn in range(number + 1):
                await ask(process.runtime, one, f"r{number}-{turn}", tokens=2)
        text, _ = process.metrics.render()
        series = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
        names = [name for name, _, _ in series]
        assert len(names) == len(set(names))
        identity = r',?(namespace|component|endpoint|worker_id)="[^"]*"'
        values = {re.sub(identity, "", name).replace("{,", "{"): float(value) for name, _, value in series}
        assert values['kvolt_worker_requests_total{model="sim-tiny",outcome="finished"}'] == 6
        assert values['kvolt_worker_prompt_tokens_total{model="sim-tiny"}'] == 6 * 20
        assert values['kvolt_worker_kv_total_blocks{dp_rank="0",model="sim-tiny"}'] == 3 * ARGUMENTS.kv_blocks
        assert values['vllm:generation_tokens_total{engine="0",model_name="sim-tiny"}'] == 12
        assert values['vllm:time_to_first_token_seconds_count{engine="0",model_name="sim-tiny"}'] == 6
        assert values['kvolt_worker_load_seconds{model="sim-tiny"}'] > 0
        assert values['kvolt_worker_kv_history_bytes{model="sim-tiny"}'] > 0
        [uptime] = [value for name, value in values.items() if name.startswith("kvolt_worker_uptime")]
        assert uptime > 0
        # As many series as of one worker.
        per_worker = sum(name.startswith("kvolt_worker_step_seconds_bucket") for name in names)
        assert per_worker == 23


async def test_an_operator_moves_all_of_them() -> None:
    async with fleet_of(3) as (process, fleet):
        runtime = process.runtime

        async def states() -> set[InstanceState]:
            return {one.state for one in await registered(runtime)}

        assert runtime.health.ready()
        await runtime.cordon()
        assert await states() == {InstanceState.CORDONED}
        assert runtime.health.not_ready() == {"workers": "cordoned: 3 of 3 workers"}
        await runtime.resume()
        assert await states() == {InstanceState.READY}
        assert runtime.health.ready()
        await runtime.drain(1.0)
        assert await states() == {InstanceState.DRAINING}
        await runtime.resume()
        assert (await runtime.status()).details["workers"] == 3
        for number, one in enumerate(await registered(runtime)):
            await ask(runtime, one, f"r{number}", tokens=20)
        cleared = await runtime.command("clear_kv_blocks", b"")
        assert cleared["cleared_blocks"] == 3 * 2
        fleet.workers[1]._on_stuck("a test says so")
        assert not runtime.health.healthy()
        assert runtime.health.not_ready() == {"workers": "unhealthy: 1 of 3 workers"}
        fleet.workers[1]._set_health(HealthState.READY)
        assert runtime.health.healthy()


async def test_a_worker_that_leaves_takes_its_registration_along_and_no_other() -> None:
    async with fleet_of(3) as (process, _):
        instances = await registered(process.runtime)
        await process.runtime.children[1].close(0.0)
        left = await registered(process.runtime)
        assert [one for one in instances if one.process != "sim-1"] == left


async def test_a_part_has_the_discovery_and_the_events_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet_of(2) as (process, _):
        main, part = process.runtime, process.runtime.children[0]
        instances = await registered(part)
        assert len(instances) == 2
        client = await part.client(instances[0].endpoint)
        await client.wait_synced(5.0)
        assert {one.id for one in client.instances()} == {one.id for one in instances}
        assert part.events.publisher == main.events.publisher
        heard = part.events.subscribe("news")
        main.events.publish("news", b"x")
        assert (await anext(heard)).payload == b"x"
        await heard.aclose()
        await part.stop_serving(instances[0].endpoint)
        assert len(await registered(part)) == 1
        await part.discovery.revoke(await part.discovery.lease(1.0))
        assert len(await registered(part)) == 1, "the lease is the process's, and stays"

        async def lost(key: str) -> None:
            raise DiscoveryLost("gone", store="mem")

        monkeypatch.setattr(main.discovery, "delete", lost)
        await part.close(0.0)


async def test_the_history_of_events_is_bounded_for_all_together() -> None:
    async with fleet_of(32) as (_, fleet):
        assert {worker._options.kv_history_bytes for worker in fleet.workers} == {2 << 20}


async def test_stopping_lets_running_requests_end_and_takes_all_registrations_along() -> None:
    async with running(SETTINGS, "other", ProcessRole.WORKER) as other, fleet_of(8) as (process, fleet):
        instances = await registered(process.runtime)
        answers = [
            asyncio.get_running_loop().create_task(ask(other.runtime, one, f"r-{one.id}", tokens=200))
            for one in instances
        ]
        async with asyncio.timeout(20):
            while sum(worker.metrics.num_open() for worker in fleet.workers) < 8:
                await asyncio.sleep(0.001)
        stopping = asyncio.get_running_loop().create_task(process.runtime.close(20.0))
        assert await asyncio.gather(*answers) == [200] * 8
        async with asyncio.timeout(20):
            await stopping
        assert not [key for part in process.runtime.children for key in part.discovery._keys]  # type: ignore[attr-defined]


async def test_an_engine_that_dies_ends_the_process() -> None:
    with pytest.raises(EngineDied):
        async with fleet_of(3) as (_, fleet):

            def broken(*_: object) -> None:
                raise RuntimeError("a bug")

            fleet.workers[1]._engine._scheduler.plan = broken  # type: ignore[attr-defined]
            fleet.workers[1]._engine.submit(make_request())
            await asyncio.sleep(5)


async def test_workers_cannot_share_a_port() -> None:
    settings = msgspec.structs.replace(
        SETTINGS, runtime=msgspec.structs.replace(SETTINGS.runtime, port=17_651)
    )
    with pytest.raises(ConfigError, match="2 workers cannot share a port"):
        async with fleet_of(2, settings):
            pass


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ((1024, 20_000), (9856, 20_000)),
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (9856, resource.RLIM_INFINITY)),
        ((20_000, 20_000), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_as_many_files_as_the_system_allows(
    limits: tuple[int, int], wanted: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, value: put.append(value))
    process.raise_open_file_limit(256 + 32 * 300)
    assert put == ([wanted] if wanted else [])


@pytest.mark.parametrize(
    ("engine", "count", "told"),
    [
        ("native", 2, "the native engine supports one worker per process"),
        ("sim", 0, "0 workers in one process"),
        ("sim", 5000, "5000 workers in one process"),
    ],
)
def test_only_engines_that_can(engine: str, count: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_engine(WorkerSettings(engine=engine, model="sim-tiny", per_process=count))
    assert check_engine(WorkerSettings(engine="sim", model="sim-tiny", per_process=300))[0] == "sim"
