"""A processes of a vLLM on another host than its leader: it runs until it is stopped, or says that it has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from kvolt.core.errors import ConfigError, EngineFailed
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import build_headless_node
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.headless_node import NodeProcesses, VllmHeadlessNode

SPEC = EngineSpec(model="m", role=Role.AGGREGATED)
SECOND = VllmArguments(engine_args={"nnodes": 2, "node_rank": 1})


class Processes:
    def __init__(self) -> None:
        self.started, self.may_start = threading.Event(), threading.Event()
        self.waited, self.over = threading.Event(), threading.Event()
        self.may_start.set()
        self.num_stops = 0

    def start(self, spec: EngineSpec, arguments: VllmArguments, folder: Path) -> NodeProcesses:
        assert folder.is_dir()
        self.started.set()
        self.may_start.wait(20)
        return NodeProcesses(self.wait, self.stop)

    def wait(self) -> None:
        self.waited.set()
        self.over.wait(20)

    def stop(self) -> None:
        self.num_stops += 1
        self.over.set()


@pytest.mark.parametrize("given", [{}, {"nnodes": 2, "node_rank": 0}])
def test_the_first_node_leads(given: dict[str, Any]) -> None:
    assert build_headless_node("vllm", SPEC, {"engine_args": given}) is None


def test_every_other_node_follows() -> None:
    found = build_headless_node("vllm", SPEC, {"engine_args": {"nnodes": 2, "node_rank": 1}})
    assert isinstance(found, VllmHeadlessNode)


@pytest.mark.parametrize("engine", ["sim", "native", "remote"])
def test_other_engines_have_no_followers(engine: str) -> None:
    assert build_headless_node(engine, SPEC, {}) is None


async def test_it_runs_until_it_is_stopped() -> None:
    processes = Processes()
    running = asyncio.ensure_future(VllmHeadlessNode(SPEC, SECOND, processes.start).run())
    await asyncio.to_thread(processes.waited.wait, 20)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert processes.num_stops == 1


async def test_it_is_stopped_while_it_starts() -> None:
    processes = Processes()
    processes.may_start.clear()
    running = asyncio.ensure_future(VllmHeadlessNode(SPEC, SECOND, processes.start).run())
    await asyncio.to_thread(processes.started.wait, 20)
    running.cancel()
    await asyncio.wait([running])
    processes.may_start.set()
    await asyncio.to_thread(processes.over.wait, 20)
    assert processes.num_stops == 1
    assert not processes.waited.is_set()


async def test_ended_processes_are_reported() -> None:
    processes = Processes()
    processes.over.set()
    with pytest.raises(EngineFailed, match="node 0"):
        await VllmHeadlessNode(SPEC, SECOND, processes.start).run()
    assert processes.num_stops == 1


async def test_what_cannot_start_says_why() -> None:
    def refused(*given: object) -> NodeProcesses:
        raise ConfigError("no", key="args", remedy="say yes")

    with pytest.raises(ConfigError):
        await VllmHeadlessNode(SPEC, SECOND, refused).run()


def test_the_process_ends_while_one_waits_for_its_leader() -> None:
    """Nothing waits for that thread: neither the loop's end nor the interpreter's."""
    code = """
        import asyncio, threading
        from kvolt.core.request import Role
        from kvolt.engines.contract import EngineSpec
        from kvolt.engines.vllm.arguments import VllmArguments
        from kvolt.engines.vllm.headless_node import VllmHeadlessNode

        started = threading.Event()

        def start(spec, arguments, folder):
            started.set()
            threading.Event().wait()

        async def main():
            follower = VllmHeadlessNode(EngineSpec(model="m", role=Role.AGGREGATED), VllmArguments(), start)
            running = asyncio.ensure_future(follower.run())
            await asyncio.to_thread(started.wait)
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()

        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=20)


async def test_its_folder_stays_for_as_long_as_it_starts() -> None:
    processes, folders = Processes(), []
    processes.may_start.clear()

    def start(spec: EngineSpec, arguments: VllmArguments, folder: Path) -> NodeProcesses:
        folders.append(folder)
        return processes.start(spec, arguments, folder)

    running = asyncio.ensure_future(VllmHeadlessNode(SPEC, SECOND, start).run())
    await asyncio.to_thread(processes.started.wait, 20)
    running.cancel()
    await asyncio.wait([running])
    assert folders[0].is_dir()
    processes.may_start.set()
    await asyncio.to_thread(processes.over.wait, 20)
    async with asyncio.timeout(20):
        while folders[0].exists():
            await asyncio.sleep(0.01)
