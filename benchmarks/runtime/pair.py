"""Runs a server and a client as two processes and reads their meters before and after the work.

The processes are fresh for each measurement. Start, opening of streams and warm-up lie outside the
measured window, which is from the first step to the arrival of the last item.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.runtime.workload import WAIT_S, Command, Job, Mark, Work

_ROOT = Path(__file__).resolve().parents[2]
_STOP_S = 10.0
_MAX_LINE_BYTES = 1 << 24


class BrokenRun(Exception):
    """A process ended early or did not answer: there is no figure to show."""


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    @classmethod
    async def start(cls, job: Job) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.runtime.child",
            msgspec.json.encode(job).decode(),
            cwd=_ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        return cls(process, f"{job.system} {job.side}")

    def tell(self, work: Work | None = None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Command(work)) + b"\n")

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(WAIT_S + 5):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BrokenRun(f"{self._name} did not answer") from None
        if not line:
            raise BrokenRun(f"{self._name} ended early")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def mark(self) -> Mark:
        self.tell()
        return msgspec.convert((await self.hear())["mark"], Mark)

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class Done(msgspec.Struct, frozen=True):
    """What came of one stretch of work: time, and what both sides used for it."""

    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    server: dict[str, int]
    """Counters of the server, over the work."""
    client: dict[str, int]
    server_rss_bytes: int
    client_rss_bytes: int
    found: dict[str, Any]
    """What the client found beyond counting."""
    profiles: tuple[str, str] = ("", "")

    @property
    def cpu_s(self) -> float:
        return self.server_cpu_s + self.client_cpu_s


class Pair:
    """A server and a client with all streams open."""

    def __init__(self, server: _Child, client: _Child) -> None:
        self._server = server
        self._client = client
        self.idle_rss_bytes: tuple[int, int] = (0, 0)
        """Of server and client, before the first stream."""

    async def work(self, work: Work) -> Done:
        before = await self._server.mark(), await self._client.mark()
        self._client.tell(work)
        self._server.tell(work)
        produced, consumed = await self._server.hear(), await self._client.hear()
        after = await self._server.mark(), await self._client.mark()
        started, ended = produced.pop("started"), consumed.pop("ended")
        return Done(
            wall_s=ended - started,
            server_cpu_s=after[0].cpu_s - before[0].cpu_s,
            client_cpu_s=after[1].cpu_s - before[1].cpu_s,
            server=_difference(before[0], after[0]),
            client=_difference(before[1], after[1]),
            server_rss_bytes=after[0].rss_bytes,
            client_rss_bytes=after[1].rss_bytes,
            found={key: value for key, value in consumed.items() if key not in ("started", "profile")},
            profiles=(produced.get("profile", ""), consumed.get("profile", "")),
        )


def _difference(before: Mark, after: Mark) -> dict[str, int]:
    return {name: value - before.counters.get(name, 0) for name, value in after.counters.items()}


@asynccontextmanager
async def open_pair(system: str, streams: int, profile: bool = False) -> AsyncIterator[Pair]:
    children: list[_Child] = []
    try:
        children.append(await _Child.start(Job(system, "server", streams, profile=profile)))
        hello = await children[0].hear()
        children.append(await _Child.start(Job(system, "client", streams, hello["address"], profile)))
        pair = Pair(children[0], children[1])
        greeting = await children[1].hear()
        pair.idle_rss_bytes = hello["mark"]["rss_bytes"], greeting["mark"]["rss_bytes"]
        for child in children:
            await child.hear()
        yield pair
    finally:
        for child in reversed(children):
            await child.stop()
