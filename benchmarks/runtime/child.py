"""One process of a pair: takes commands as JSON lines over a socket, answers as JSON lines.

Started by `plane`: `python -m benchmarks.runtime.child JOB DESCRIPTOR`. Exits when its socket is closed. A module of a
system has `serve(job)`, whose result has an `address`, `wait_open` and `produce`, and `connect(job)`, whose result has
`open` and `consume`; both have `counters` and `close`.
"""

from __future__ import annotations

import asyncio
import importlib
import resource
import socket
import sys
import time
from typing import Any

import msgspec
import psutil
import uvloop
from benchmarks.runtime.workload import Job, Mark, Work

_MODULES = {"bare socket": "over_socket", "grpc.aio": "over_grpc", "kvolt bulk": "over_kvolt_bulk"}


def _mark(side: Any) -> Mark:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Mark(used.ru_utime + used.ru_stime, psutil.Process().memory_info().rss, side.counters())


async def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    commands, answers = await asyncio.open_connection(sock=socket.socket(fileno=int(sys.argv[2])))

    def send(answer: Any) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    # The systems live apart, so that no process pays for a library that it does not use.
    module = importlib.import_module(f"benchmarks.runtime.{_MODULES.get(job.system, 'over_kvolt')}")
    is_server = job.side == "server"
    side = await (module.serve if is_server else module.connect)(job)
    send({"address": side.address if is_server else "", "mark": _mark(side)})
    await (side.wait_open() if is_server else side.open())
    send({})
    while line := await commands.readline():
        work = msgspec.json.decode(line, type=Work | None)
        if work is None:  # to read its meters
            send({"mark": _mark(side)})
        else:
            started = time.monotonic()
            result = await (side.produce if is_server else side.consume)(work)
            send({"started": started, "ended": time.monotonic(), **result})
    await side.close()


if __name__ == "__main__":
    uvloop.run(main())
