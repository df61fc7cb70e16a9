"""The least that any client pays: it reads all bytes and looks at none but the last five.

usage: python -m benchmarks.load.bare PORT CONCURRENCY REQUESTS TOKENS

What a load generator uses beyond this is its own doing. On uvloop, as the others are.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import cast

import uvloop

_END = b"0\r\n\r\n"


class _Reader(asyncio.Protocol):
    """A connection that asks again after each answer, as long as requests are left."""

    def __init__(self, left: Iterator[bytes], on_answer: Callable[[], None]) -> None:
        self._left = left
        self._on_answer = on_answer
        self.transport: asyncio.Transport
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        request = next(self._left, None)
        if request is not None:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if data.endswith(_END) or (len(data) < len(_END) and (self._tail + data).endswith(_END)):
            self._on_answer()
            self._ask()
        self._tail = data[-len(_END) :]


async def read_all(port: int, concurrency: int, num_requests: int, num_tokens: int) -> None:
    body = b'{"max_tokens":%d}' % num_tokens
    request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    left, num_answers, loop = repeat(request, num_requests), 0, asyncio.get_running_loop()
    over = loop.create_future()

    def on_answer() -> None:
        nonlocal num_answers
        num_answers += 1
        if num_answers == num_requests:
            over.set_result(None)

    readers = [_Reader(left, on_answer) for _ in range(min(concurrency, num_requests))]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)  # type: ignore[misc]
    await over
    for reader in readers:
        reader.transport.close()
    print(num_answers, num_tokens)


if __name__ == "__main__":
    uvloop.run(read_all(*map(int, sys.argv[1:])))
