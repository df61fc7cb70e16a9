"""A scripted server on a real socket, on a loop of its own: for tests in which the command owns the main thread."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.bench.load.scripted_server import ScriptedServer

START_S = 20.0


@contextmanager
def listening(server: ScriptedServer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port while it listens."""
    ports: list[int] = []
    started, loops = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()

    async def serve() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        listener = await loop.create_server(server.protocol, "127.0.0.1", 0, ssl=tls)
        ports.append(listener.sockets[0].getsockname()[1])
        loops.append((loop, over))
        started.set()
        await over.wait()
        listener.close()
        server.close()
        await asyncio.sleep(0.01)  # what was aborted is told so

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(START_S)
    try:
        yield ports[0]
    finally:
        loop, over = loops[0]
        loop.call_soon_threadsafe(over.set)
        thread.join(START_S)
