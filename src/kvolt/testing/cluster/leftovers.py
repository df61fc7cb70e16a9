"""Leftovers of an idle cluster: streams that are still open, except those of discovery and events.

Counts at each place that keeps a stream (caller session, server session, endpoint server, worker, engine), since a
defect may leave it in one of them only. Reads internals of the tcp plane. Must not know requests or faults.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from kvolt.core.load import WorkerLoad
from kvolt.runtime.join.server import HOLD, WATCH
from kvolt.runtime.plane.session import Session
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.process_control import EVENTS_ENDPOINT
from kvolt.runtime.runtime import Runtime

STANDING = (HOLD, WATCH, EVENTS_ENDPOINT)
"""Endpoints with permanent streams."""


async def lasting_leftovers(processes: Mapping[str, Runtime], pause_s: float) -> list[str]:
    """Leftovers that exist at two times, `pause_s` apart.

    A router that follows KV events may call a quiet worker at any time, so one check is not enough.
    """
    first = await leftovers(processes)
    if not first:
        return []
    await asyncio.sleep(pause_s)
    return [each for each in await leftovers(processes) if each in first]


async def leftovers(processes: Mapping[str, Runtime]) -> list[str]:
    """One sentence for each leftover of the running processes, by name."""
    problems: list[str] = []
    served_to: Counter[str] = Counter()
    for name, runtime in processes.items():
        for session in _sessions(runtime):
            if session.num_served and session.peer is not None:
                served_to[session.peer.address or "a process without an address"] += session.num_served
        problems += [f"{name} still has {what}" for what in _served_leftovers(runtime)]
        problems += [f"{name} still has {what}" for what in await _engine_leftovers(runtime)]
    for name, runtime in processes.items():
        num_served = served_to.pop(runtime.plane.address or "", 0)
        num_calls = sum(session.num_calls for session in _sessions(runtime))
        if num_calls != num_served:
            problems.append(f"{name} still has {num_calls} calls open, of which {num_served} are served")
    problems += [
        f"{number} streams are served to {address}, which has no open call"
        for address, number in served_to.items()
    ]
    return problems


def _sessions(runtime: Runtime) -> list[Session]:
    plane = runtime.plane
    assert isinstance(plane, TcpPlane)
    return [connection.session for connection in plane.all()]


def _served_leftovers(runtime: Runtime) -> Iterator[str]:
    if num_active := runtime.server.num_active:
        yield f"{num_active} streams at its endpoints"
    num_standing = sum(runtime.server.num_active_streams(endpoint) for endpoint in STANDING)
    num_served = sum(session.num_served for session in _sessions(runtime))
    if num_served != num_standing:
        yield f"{num_served} served streams on its connections, of which {num_standing} are of discovery and events"
    if num_waiting := sum(session.num_backlogged + session.num_bulk for session in _sessions(runtime)):
        yield f"{num_waiting} streams with something to send"


async def _engine_leftovers(runtime: Runtime) -> Iterator[str]:
    engine = (await runtime.status()).details.get("engine")
    if engine is None:
        return iter(())
    load = msgspec.convert(engine["load"], WorkerLoad)
    counts = {
        "requests open in its worker": engine["open"],
        "requests running in its engine": load.running,
        "requests waiting in its engine": load.waiting,
        "blocks used in its engine": load.kv_used_blocks,
    }
    return (f"{number} {what}" for what, number in counts.items() if number)
