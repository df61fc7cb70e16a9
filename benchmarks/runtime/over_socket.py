"""The limit: as many bytes in as many writes as kvolt made, over a bare socket and nothing else.

One connection, one write per turn of the loop. The reader counts bytes and sends as many small writes
back as kvolt's reader sent credit.

A second limit, `bare msgpack`, adds what no plane can leave out when items are Python objects:
each write is one frame of all streams' items, encoded; the reader decodes it and looks at each item.
No credit, no deadlines, no streams.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from benchmarks.runtime.workload import WAIT_S, Arrivals, Job, Tally, Work, sample_steps

from kvolt.core.delta import plain_delta
from kvolt.runtime.network import SocketNetwork, tune_socket
from kvolt.runtime.plane import wire

BARE = "bare socket"
CODEC = "bare msgpack"


class _Peer(asyncio.Protocol):
    """Counts what comes, and knows when the transport is full."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self.transport: asyncio.Transport
        self.bytes_in = 0
        self.room = asyncio.Event()
        self.room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        tune_socket(transport)
        self._arrivals.add()

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()


class BareServer:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._arrivals = Arrivals(1)
        self._peer = _Peer(self._arrivals)
        self._deltas = [[plain_delta(token_id) for token_id in step] for step in sample_steps(job.streams)]
        self._listener: Any = None
        self.address = ""

    async def start(self) -> None:
        self._listener = await SocketNetwork().listen("127.0.0.1:0", lambda: self._peer)
        self.address = self._listener.address

    async def wait_open(self) -> None:
        await self._arrivals.wait()

    async def produce(self, work: Work) -> dict[str, Any]:
        if self._job.system == CODEC:
            await self._produce_frames(work.steps)
        else:
            await self._produce_bytes(work)
        return {}

    async def _produce_bytes(self, work: Work) -> None:
        size, num_longer = divmod(work.num_bytes, work.steps)
        short, longer = bytes(size), bytes(size + 1)
        write, room = self._peer.transport.write, self._peer.room
        for step in range(work.steps):
            write(longer if step < num_longer else short)
            if not room.is_set():
                async with asyncio.timeout(WAIT_S):
                    await room.wait()
            await asyncio.sleep(0)

    async def _produce_frames(self, num_steps: int) -> None:
        write, room = self._peer.transport.write, self._peer.room
        deltas = self._deltas
        ids, mask = range(1, 2 * self._job.streams, 2), len(deltas) - 1
        for step in range(num_steps):
            items = list(zip(ids, deltas[step & mask], strict=True))
            write(wire.frame(wire.FrameKind.DELTAS, 0, wire.encode(items)))
            if not room.is_set():
                async with asyncio.timeout(WAIT_S):
                    await room.wait()
            await asyncio.sleep(0)

    def counters(self) -> dict[str, int]:
        return {"bytes_in": self._peer.bytes_in}

    async def close(self) -> None:
        self._peer.transport.close()
        await self._listener.close()


class _Replier(_Peer):
    """Counts bytes, and answers with a small write each time its share of them is there."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(Arrivals(1))
        self._tally = tally
        self._reply_every = 0
        self._reply_at = 0
        self._reply = b""

    def plan(self, work: Work) -> None:
        self._reply_every = work.num_bytes // work.replies if work.replies else 0
        self._reply_at = self.bytes_in + self._reply_every
        self._reply = bytes(work.reply_bytes // work.replies) if work.replies else b""

    def data_received(self, data: bytes) -> None:
        tally = self._tally
        self.bytes_in = received = self.bytes_in + len(data)
        while self._reply_every and received >= self._reply_at:
            self._reply_at += self._reply_every
            self.transport.write(self._reply)
        tally.tokens = received
        if received >= tally.expected:
            tally.reach()


class _FrameReader(_Peer):
    """Decodes every item and looks at it."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(Arrivals(1))
        self._tally = tally
        self._decoder = wire.FrameDecoder(1 << 20)

    def data_received(self, data: bytes) -> None:
        self.bytes_in += len(data)
        tally = self._tally
        for _, _, payload in self._decoder.feed(data):
            for _, delta in wire.decode_deltas(payload):
                tally.tokens += len(delta.token_ids)
        if tally.tokens >= tally.expected:
            tally.reach()


class BareClient:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._tally = Tally()
        self._peer = _FrameReader(self._tally) if job.system == CODEC else _Replier(self._tally)

    async def open(self) -> None:
        await SocketNetwork().connect(self._job.address, lambda: self._peer, WAIT_S)

    async def consume(self, work: Work) -> dict[str, Any]:
        if isinstance(self._peer, _Replier):
            self._peer.plan(work)
            self._tally.expected += work.num_bytes
        else:
            self._tally.expected += work.steps * self._job.streams
        await self._tally.reached()
        return {}

    def counters(self) -> dict[str, int]:
        return {"bytes_in": self._peer.bytes_in, "tokens": self._tally.tokens}

    async def close(self) -> None:
        self._peer.transport.close()


async def serve(job: Job) -> BareServer:
    server = BareServer(job)
    await server.start()
    return server


async def connect(job: Job) -> BareClient:
    return BareClient(job)
