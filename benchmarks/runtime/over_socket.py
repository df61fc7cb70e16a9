"""The limit: as many bytes in as many writes as kvolt made, over a bare socket and nothing else.

One connection, one write per turn of the loop. The reader counts bytes and sends as many small writes
back as kvolt's reader sent credit.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from benchmarks.runtime.workload import WAIT_S, Arrivals, Job, Tally, Work

from kvolt.runtime.network import SocketNetwork, tune_socket

BARE = "bare socket"


class _Peer(asyncio.Protocol):
    """Counts what comes, and knows when the transport is full."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(1)
        self.transport: asyncio.Transport
        self.bytes_in = 0
        self.room = asyncio.Event()
        self.room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tune_socket(transport)
        self.arrivals.add()

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()


class BareServer:
    def __init__(self) -> None:
        self._peer = _Peer()
        self.wait_open = self._peer.arrivals.wait
        self._listener: Any = None
        self.address = ""

    async def start(self) -> None:
        self._listener = await SocketNetwork().listen("127.0.0.1:0", lambda: self._peer)
        self.address = self._listener.address

    async def produce(self, work: Work) -> dict[str, Any]:
        size, num_longer = divmod(work.num_bytes, work.steps)
        short, longer = bytes(size), bytes(size + 1)
        write, room = self._peer.transport.write, self._peer.room
        for step in range(work.steps):
            write(longer if step < num_longer else short)
            if not room.is_set():
                async with asyncio.timeout(WAIT_S):
                    await room.wait()
            await asyncio.sleep(0)
        return {}

    def counters(self) -> dict[str, int]:
        return {"bytes_in": self._peer.bytes_in}

    async def close(self) -> None:
        self._peer.transport.close()
        await self._listener.close()


class BareClient(_Peer):
    """Counts bytes, and answers with a small write each time its share of them is there."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._tally = Tally(job.streams)
        self._reply_every = 0
        self._reply_at = 0
        self._reply = b""

    async def open(self) -> None:
        await SocketNetwork().connect(self._job.address, lambda: self, WAIT_S)

    async def consume(self, work: Work) -> dict[str, Any]:
        self._reply_every = work.num_bytes // work.replies if work.replies else 0
        self._reply_at = self.bytes_in + self._reply_every
        self._reply = bytes(work.reply_bytes // work.replies) if work.replies else b""
        return await self._tally.consume(work)

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        self.bytes_in = received = self.bytes_in + len(data)
        while self._reply_every and received >= self._reply_at:
            self._reply_at += self._reply_every
            self.transport.write(self._reply)
        tally.tokens = received
        if received >= tally.expected:
            tally.reach()

    def counters(self) -> dict[str, int]:
        return {"bytes_in": self.bytes_in, "tokens": self._tally.tokens}

    async def close(self) -> None:
        self.transport.close()


async def serve(job: Job) -> BareServer:
    server = BareServer()
    await server.start()
    return server


async def connect(job: Job) -> BareClient:
    return BareClient(job)
