"""`mem` and `file` pass the conformance suite, on a real loop and on virtual time."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from kvolt.runtime.clock import Blocking, Clock, SystemClock, ThreadBlocking
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.testing.discovery import suite as discovery_suite
from kvolt.testing.discovery.suite import CASES, Case, run_case
from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, run_virtual


class MemHarness:
    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._rng = random.Random(1)
        self._store = MemStore()
        self._clients: list[MemDiscovery] = []

    async def client(self) -> Discovery:
        self._clients.append(MemDiscovery(self._store, self._clock, self._rng))
        return self._clients[-1]

    async def crash(self, client: Discovery) -> None:
        assert isinstance(client, MemDiscovery)
        client.abandon()

    async def set_reachable(self, reachable: bool) -> None:
        if reachable:
            self._store.online()
        else:
            self._store.offline()

    async def wipe(self) -> None:
        self._store.wipe()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class FileHarness:
    """The store is lost by moving the directory away and putting a file in its place."""

    def __init__(self, root: Path, clock: Clock, blocking: Blocking, ttl_s: float, poll_s: float) -> None:
        self.ttl_s = ttl_s
        self._poll_s = poll_s
        self._directory = root / "discovery"
        self._elsewhere = root / "elsewhere"
        self._clock = clock
        self._blocking = blocking
        self._rng = random.Random(1)
        self._clients: list[FileDiscovery] = []

    async def client(self) -> Discovery:
        client = FileDiscovery(
            self._directory, self._clock, self._blocking, random.Random(self._rng.random()), self._poll_s
        )
        self._clients.append(client)
        return client

    async def crash(self, client: Discovery) -> None:
        assert isinstance(client, FileDiscovery)
        await client.abandon()

    async def set_reachable(self, reachable: bool) -> None:
        if reachable:
            self._directory.unlink()
            if self._elsewhere.exists():
                self._elsewhere.rename(self._directory)
        else:
            self._directory.rename(self._elsewhere)
            self._directory.touch()

    async def wipe(self) -> None:
        if self._directory.is_dir():
            while self._directory.exists():
                shutil.rmtree(self._directory, ignore_errors=True)
        else:
            shutil.rmtree(self._elsewhere)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if isinstance(self._blocking, ThreadBlocking):
            self._blocking.close()


@pytest.mark.parametrize("case", CASES, ids=discovery_suite.name)
async def test_mem(case: Case) -> None:
    await run_case(case, lambda: MemHarness(SystemClock(), ttl_s=0.05))


@pytest.mark.parametrize("case", CASES, ids=discovery_suite.name)
def test_mem_virtual(case: Case) -> None:
    run_virtual(lambda: run_case(case, lambda: MemHarness(VirtualClock(), ttl_s=10.0)), until_s=600)


@pytest.mark.parametrize("case", CASES, ids=discovery_suite.name)
async def test_file(case: Case, tmp_path: Path) -> None:
    await run_case(case, lambda: FileHarness(tmp_path, SystemClock(), ThreadBlocking(), 0.6, poll_s=0.02))


@pytest.mark.parametrize("case", CASES, ids=discovery_suite.name)
def test_file_virtual(case: Case, tmp_path: Path) -> None:
    def harness() -> FileHarness:
        return FileHarness(tmp_path, VirtualClock(), InlineBlocking(latency_s=0.001), 3.0, poll_s=0.25)

    run_virtual(lambda: run_case(case, harness), until_s=600)
