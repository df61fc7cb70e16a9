"""One process of a pair: takes commands as JSON lines over a socket, answers as JSON lines.

Started by `pair`: `python -m benchmarks.runtime.child JOB DESCRIPTOR`. Exits when its socket is closed.
"""

from __future__ import annotations

import asyncio
import cProfile
import importlib
import io
import pstats
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import psutil
import uvloop
from benchmarks.runtime.workload import Client, Command, Job, Mark, Server, Work

_PROFILE_LINES = 25

_MODULES = {
    "kvolt whole step": "over_kvolt",
    "kvolt step": "over_kvolt",
    "kvolt sink": "over_kvolt",
    "kvolt iterator": "over_kvolt",
    "kvolt generators": "over_kvolt",
    "kvolt bulk": "over_kvolt_bulk",
    "bare socket": "over_socket",
    "bare msgpack": "over_socket",
    "grpc.aio": "over_grpc",
}

Act = Callable[[Work], Awaitable[dict[str, Any]]]


def _mark(side: Server | Client) -> Mark:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Mark(used.ru_utime + used.ru_stime, psutil.Process().memory_info().rss, side.counters())


def _module(system: str) -> Any:
    """The systems live apart, so that no process pays for a library that it does not use."""
    return importlib.import_module(f"benchmarks.runtime.{_MODULES[system]}")


async def _perform(act: Act, work: Work, profile: bool) -> dict[str, Any]:
    profiler = cProfile.Profile() if profile and work.measured else None
    if profiler is not None:
        profiler.enable()
    started = time.monotonic()
    found = await act(work)
    ended = time.monotonic()
    if profiler is not None:
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_PROFILE_LINES)
        found = {**found, "profile": text.getvalue()}
    return {"started": started, "ended": ended, **found}


async def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    commands, answers = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[2])))

    def send(answer: Any) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    module = _module(job.system)
    side: Server | Client
    act: Act
    if job.side == "server":
        server: Server = await module.serve(job)
        side, act = server, server.produce
        send({"address": server.address, "mark": _mark(side)})
        await server.wait_open()
    else:
        client: Client = await module.connect(job)
        side, act = client, client.consume
        send({"mark": _mark(side)})
        await client.open()
    send({})
    while line := await commands.readline():
        command = msgspec.json.decode(line, type=Command)
        if command.work is None:
            send({"mark": _mark(side)})
        else:
            send(await _perform(act, command.work, job.profile))
    await side.close()


if __name__ == "__main__":
    uvloop.run(main())
