"""The least that any client pays: it reads all bytes and looks at none but the last five.

usage: python -m benchmarks.load.bare PORT CONCURRENCY REQUESTS TOKENS

What a load generator uses beyond this is its own doing. On uvloop, as the others are.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

import uvloop
from benchmarks.load.client import Delay, Load, Seen

NAME = "bare reads"

_END = b"0\r\n\r\n"


class BareReads:
    name = NAME

    def command(self, load: Load, folder: Path) -> list[str]:
        numbers = (load.port, load.concurrency or 1, load.requests, load.output_tokens)
        return [sys.executable, "-m", "benchmarks.load.bare", *map(str, numbers)]

    def environ(self) -> dict[str, str]:
        return {}

    def seen(self, folder: Path, stdout: bytes) -> Seen:
        answers, tokens = map(int, stdout.split())
        nothing = Delay(0.0, 0.0)
        return Seen(
            answers=answers,
            failed=0,
            output_tokens=answers * tokens,
            input_tokens=0.0,
            first=nothing,
            gap=None,
            per_token=None,
        )


class _Reader(asyncio.Protocol):
    def __init__(self, work: _Work) -> None:
        self._work = work
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._work.transports.append(self._transport)
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        if self._work.take():
            self._transport.write(self._work.request)

    def data_received(self, data: bytes) -> None:
        if data.endswith(_END) or (len(data) < len(_END) and (self._tail + data).endswith(_END)):
            self._work.answered()
            self._ask()
        self._tail = data[-len(_END) :]


class _Work:
    def __init__(self, num_requests: int, num_tokens: int) -> None:
        body = b'{"max_tokens":%d}' % num_tokens
        self.request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (
            len(body),
            body,
        )
        self.over = asyncio.get_running_loop().create_future()
        self.transports: list[asyncio.Transport] = []
        self.num_answers = 0
        self._num_requests = num_requests
        self._num_asked = 0

    def take(self) -> bool:
        self._num_asked += 1
        return self._num_asked <= self._num_requests

    def answered(self) -> None:
        self.num_answers += 1
        if self.num_answers == self._num_requests:
            self.over.set_result(None)


async def read_all(port: int, concurrency: int, num_requests: int, num_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    work = _Work(num_requests, num_tokens)
    for _ in range(min(concurrency, num_requests)):
        await loop.create_connection(lambda: _Reader(work), "127.0.0.1", port)
    await work.over
    for transport in work.transports:
        transport.close()
    print(work.num_answers, num_tokens)


if __name__ == "__main__":
    uvloop.run(read_all(*map(int, sys.argv[1:])))
