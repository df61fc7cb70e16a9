"""Operators' commands on a worker: sleep and wake, and adapters that outlive a restart of their worker."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from tests.unit.engines.adapter_lab import BROKEN, CRASHING, WithAdapters
from tests.unit.engines.lab import Lab, ScriptedEngine, make_request, start_stream, until

from kvolt.core.errors import InvalidRequest, KvoltError, Unavailable, Unsupported
from kvolt.testing import run_virtual
from kvolt.worker.control import LoadLora, UnloadLora
from kvolt.worker.worker import WorkerOptions


def test_a_worker_sleeps_after_its_requests_and_wakes() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            operations = running.worker.operations
            async with await start_stream(client, make_request(tokens=4)) as stream:
                await anext(stream)
                sleeping = asyncio.create_task(operations.sleep(b""))
                rest = [delta async for delta in stream]
            assert rest[-1].finish is not None, "the request finishes before the engine sleeps"
            assert await sleeping == {"is_sleeping": True}
            assert (await running.runtime.status()).details["engine"]["asleep"]
            with pytest.raises(Unavailable):
                running.engine.submit(make_request("other"))
            with pytest.raises(KvoltError):
                await start_stream(client, make_request("remote"))

            assert await operations.wake_up(b"") == {"is_sleeping": False}
            await until(lambda: bool(client.candidates()))
            async with await start_stream(client, make_request("again", tokens=2)) as stream:
                assert [delta async for delta in stream]

    run_virtual(scenario)


def test_a_worker_that_cannot_sleep_in_time_takes_requests_again() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            async with await start_stream(client, make_request(tokens=400)) as stream:
                await anext(stream)
                with pytest.raises(Unavailable, match="requests run"):
                    await running.worker.operations.sleep(b'{"timeout_s": 0.01}')
            await until(lambda: bool(client.candidates()))
            assert not running.worker.operations.is_asleep

    run_virtual(scenario)


def test_a_worker_whose_sleep_is_cancelled_takes_requests_again() -> None:
    """The operator's client gives up while requests run."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            async with await start_stream(client, make_request(tokens=400)) as stream:
                await anext(stream)
                sleeping = asyncio.create_task(running.worker.operations.sleep(b""))
                await until(lambda: not client.candidates())
                sleeping.cancel()
                await asyncio.wait([sleeping])
            await until(lambda: bool(client.candidates()))

    run_virtual(scenario)


@pytest.mark.parametrize("can_wake", [True, False])
def test_a_worker_whose_sleep_is_cancelled_halfway_is_woken(can_wake: bool) -> None:
    """An engine that falls asleep refuses requests: none must come until it is awake."""

    class SlowSleeper(ScriptedEngine):
        is_asleep = False

        async def sleep(self, level: int) -> None:
            self.is_asleep = True
            await asyncio.sleep(5.0)

        async def wake(self) -> None:
            if not can_wake:
                raise Unavailable("no memory")
            self.is_asleep = False

    async def scenario() -> None:
        async with Lab() as lab:
            engine = SlowSleeper()
            running = await lab.worker("w0", engine)
            client = await lab.client(running)
            sleeping = asyncio.create_task(running.worker.operations.sleep(b""))
            await until(lambda: engine.is_asleep)
            sleeping.cancel()
            await asyncio.gather(sleeping, return_exceptions=True)
            await asyncio.sleep(1.0)
            assert bool(client.candidates()) == (not engine.is_asleep) == can_wake
            assert running.worker.operations.is_asleep == engine.is_asleep

    run_virtual(scenario)


def test_an_asleep_worker_is_not_resumed() -> None:
    """Its engine would refuse every request."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            await running.worker.operations.sleep(b"")
            with pytest.raises(Unavailable, match="kvolt worker wake"):
                await running.runtime.resume()
            await asyncio.sleep(1.0)
            assert not client.candidates()

    run_virtual(scenario)


def test_waking_a_worker_that_is_awake_leaves_it_cordoned() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            await running.runtime.cordon()
            assert await running.worker.operations.wake_up(b"") == {"is_sleeping": False}
            await asyncio.sleep(1.0)
            assert not client.candidates()
            await running.runtime.resume()
            await until(lambda: bool(client.candidates()))

    run_virtual(scenario)


def test_every_worker_has_the_commands() -> None:
    """Also one of many in a process. Values may be text, as in vLLM's query parameters."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            assert await running.runtime.command("sleep", b'{"level": "2"}') == {"is_sleeping": True}
            assert await running.runtime.command("wake_up", b"") == {"is_sleeping": False}

    run_virtual(scenario)


def test_wrong_sleeps_are_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            operations = (await lab.worker("w0")).worker.operations
            for body in (b"[", b'{"level": 3}', b'{"timeout_s": -1}', b'{"levl": 1}'):
                with pytest.raises(InvalidRequest):
                    await operations.sleep(body)
            with pytest.raises(InvalidRequest, match="tags"):
                await operations.wake_up(b'{"tags": "weights"}')
            other = (await lab.worker("w1", WithAdapters())).worker.operations
            with pytest.raises(Unsupported, match="enable_sleep_mode"):
                await other.sleep(b"")
            with pytest.raises(Unsupported):
                await other.wake_up(b"")

    run_virtual(scenario)


def test_adapters_loaded_at_run_time_outlive_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "loras.json"
    options = WorkerOptions(lora_state=file)

    async def run(name: str) -> WithAdapters:
        """Start a worker and return its engine; the first one gets and loses adapters."""
        async with Lab() as lab:
            engine = WithAdapters("first")
            running = await lab.worker(name, engine, options=options)
            if name == "before":
                for command in (
                    LoadLora("a", "/a"),
                    LoadLora("b", "/b"),
                    UnloadLora("b"),
                    LoadLora("c", "/c"),
                ):
                    await running.worker.operations.perform(command)
                with pytest.raises(InvalidRequest):
                    await running.worker.operations.perform(LoadLora("broken", BROKEN))
            assert running.worker.info is not None
            if name == "after":
                assert running.worker.info.loras == ("first", "a", "c"), "they are registered from the start"
            return engine

    run_virtual(lambda: run("before"))
    after = run_virtual(lambda: run("after"))
    assert after.adapters == {"first": "/at/start", "a": "/a", "c": "/c"}

    file.write_text(json.dumps({"a": BROKEN, "c": "/c"}))
    caplog.set_level(logging.WARNING)
    assert run_virtual(lambda: run("again")).adapters == {"first": "/at/start", "c": "/c"}
    assert "adapter not restored: name=a" in caplog.text
    file.write_text(json.dumps({"a": CRASHING, "c": "/c"}))
    assert run_virtual(lambda: run("again")).adapters == {"first": "/at/start", "c": "/c"}
    file.write_text("{")
    assert run_virtual(lambda: run("again")).adapters == {"first": "/at/start"}
    assert "adapters not restored" in caplog.text
