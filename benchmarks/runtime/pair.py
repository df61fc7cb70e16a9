"""Runs a server and a client as two processes and reads their meters before and after the work.

The processes are fresh for each measurement. Start, opening of streams and warm-up lie outside the
measured window, which is from the first step to the arrival of the last item.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from benchmarks.processes import Child, clean_environ
from benchmarks.runtime.workload import Command, Job, Mark, Work


def _start(job: Job) -> Child:
    command = [sys.executable, "-m", "benchmarks.runtime.child", msgspec.json.encode(job).decode()]
    return Child(f"{job.system} {job.side}", command, clean_environ())


def _mark(child: Child) -> Mark:
    child.send(Command())
    return msgspec.convert(child.receive()["mark"], Mark)


class Done(msgspec.Struct, frozen=True):
    """Result of one stretch of work."""

    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    server: dict[str, int]
    """Counters of the server, over the work."""
    client: dict[str, int]
    server_rss_bytes: int
    client_rss_bytes: int
    found: dict[str, Any]
    """Measured by the client, besides its counters."""
    profiles: tuple[str, str] = ("", "")

    @property
    def cpu_s(self) -> float:
        return self.server_cpu_s + self.client_cpu_s


class Pair:
    """A server and a client with all streams open."""

    def __init__(self, server: Child, client: Child) -> None:
        self._server = server
        self._client = client
        self.idle_rss_bytes: tuple[int, int] = (0, 0)
        """Of server and client, before the first stream."""

    def work(self, work: Work) -> Done:
        before = _mark(self._server), _mark(self._client)
        self._client.send(Command(work))
        self._server.send(Command(work))
        produced, consumed = self._server.receive(), self._client.receive()
        after = _mark(self._server), _mark(self._client)
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


@contextmanager
def open_pair(system: str, streams: int, profile: bool = False) -> Iterator[Pair]:
    children: list[Child] = []
    try:
        children.append(_start(Job(system, "server", streams, profile=profile)))
        hello = children[0].receive()
        children.append(_start(Job(system, "client", streams, hello["address"], profile)))
        pair = Pair(children[0], children[1])
        greeting = children[1].receive()
        pair.idle_rss_bytes = hello["mark"]["rss_bytes"], greeting["mark"]["rss_bytes"]
        for child in children:
            child.receive()
        yield pair
    finally:
        for child in reversed(children):
            child.stop()
