"""A server that is never the limit: it answers every chat request with events it made at its start.

usage: python -m benchmarks.load.canned PORT PERIOD_MS

With a PERIOD_MS of 0 an answer is written as a whole, and comes as fast as it is read. Otherwise every stream gets a
token each PERIOD_MS, each in a write of its own, as from an engine that decodes; streams are spread over the period,
so that writes come evenly and not all at once. The first token comes at once, with a role before it; behind the last
come the finish reason, the usage and [DONE]. An answer is as long as the request's `max_tokens` or
`max_completion_tokens` says. Tokens differ; everything else of an event is what OpenAI's chunks have.
GET /asked returns the time of the first request, by the machine's monotonic clock, and the most streams open at one
time, and resets both.
"""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import time
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import cast

import uvloop

MODEL = "canned"

_TICK_S = 0.001
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "it", "for", "on", "with", "as", "are", "this"),
    "because",
)
_CREATED = 1_700_000_000
_ID = "chatcmpl-0f1e2d3c4b5a69788796a5b4c3d2e1f0"
_ASKED = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LISTING = (
    b'{"object":"list","data":[{"id":"%s","object":"model","created":0,"owned_by":"bench"}]}' % MODEL.encode()
)


def _chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(delta: str, finish_reason: str = "null") -> bytes:
    return _chunk(
        f'{{"id":"{_ID}","object":"chat.completion.chunk","created":{_CREATED},"model":"{MODEL}",'
        f'"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish_reason}}}]}}'
    )


_ROLE = _event('{"role":"assistant","content":""}')
_TOKENS = [_event(f'{{"content":" {word}"}}') for word in _WORDS]
_FINISH = _event("{}", '"length"')
_END = _chunk("[DONE]") + b"0\r\n\r\n"


def _usage(num_tokens: int) -> bytes:
    return _chunk(
        f'{{"id":"{_ID}","object":"chat.completion.chunk","created":{_CREATED},"model":"{MODEL}","choices":[],'
        f'"usage":{{"prompt_tokens":32,"completion_tokens":{num_tokens},"total_tokens":{32 + num_tokens}}}}}'
    )


@cache
def _whole_answer(num_tokens: int) -> bytes:
    tokens = b"".join(islice(cycle(_TOKENS), num_tokens))
    return _HEAD + _ROLE + tokens + _FINISH + _usage(num_tokens) + _END


@dataclass(slots=True)
class Counts:
    """Since it was asked for them."""

    began_s: float | None = None
    """When the first request came."""
    num_streams: int = 0
    peak: int = 0

    def opened(self) -> None:
        if self.began_s is None:
            self.began_s = time.monotonic()
        self.num_streams += 1
        self.peak = max(self.peak, self.num_streams)

    def closed(self) -> None:
        self.num_streams -= 1

    def take(self) -> bytes:
        encoded = b'{"began_s":%r,"peak":%d}' % (self.began_s or 0.0, self.peak)
        self.began_s, self.peak = None, self.num_streams
        return encoded


class Wheel:
    """Gives every stream on it a token once in a turn; turns only while there are streams."""

    def __init__(self, period_s: float) -> None:
        self._slots: list[dict[Stream, None]] = [{} for _ in range(max(1, round(period_s / _TICK_S)))]
        self._loop = asyncio.get_running_loop()
        self._tick = 0
        self._due_s = 0.0
        self._num_streams = 0
        self._num_put = 0

    def put(self, stream: Stream) -> int:
        """Add a stream; return the slot from which `take` removes it."""
        slot = (self._tick + self._num_put) % len(self._slots)
        self._num_put += 1
        self._slots[slot][stream] = None
        self._num_streams += 1
        if self._num_streams == 1:
            self._due_s = self._loop.time() + _TICK_S
            self._loop.call_at(self._due_s, self._turn)
        return slot

    def take(self, stream: Stream, slot: int) -> None:
        del self._slots[slot][stream]
        self._num_streams -= 1

    def _turn(self) -> None:
        for stream in list(self._slots[self._tick % len(self._slots)]):
            stream.next_token()
        self._tick += 1
        if self._num_streams:
            self._due_s += _TICK_S
            self._loop.call_at(self._due_s, self._turn)


class Stream(asyncio.Protocol):
    """A connection, and the answer that it is being given."""

    def __init__(self, wheel: Wheel | None, counts: Counts) -> None:
        self._wheel = wheel
        self._counts = counts
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._slot: int | None = None
        self._asked = self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._slot is not None:
            self._counts.closed()
        self._leave()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head_end = self._data.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._data, 0, head_end + 2)
        end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._data) >= end:
            request, self._data = self._data[:end], self._data[end:]
            self._answer(request)

    def _answer(self, request: bytes) -> None:
        assert self._transport is not None
        if request.startswith(b"GET /v1/models "):
            self._transport.write(_whole(b"200 OK", _LISTING))
        elif request.startswith(b"GET /asked "):
            self._transport.write(_whole(b"200 OK", self._counts.take()))
        elif not request.startswith(b"POST "):
            self._transport.write(_whole(b"404 Not Found", b"{}"))
        else:
            match = _ASKED.search(request)
            self._asked, self._sent = max(1, int(match[1])) if match else 16, 0
            self._counts.opened()
            if self._wheel is None:
                self._transport.write(_whole_answer(self._asked))
                self._counts.closed()
                return
            self._transport.write(_HEAD + _ROLE)
            self.next_token()
            if self._sent < self._asked:
                self._slot = self._wheel.put(self)

    def next_token(self) -> None:
        if self._transport is None:
            return
        token = _TOKENS[self._sent % len(_TOKENS)]
        self._sent += 1
        if self._sent < self._asked:
            self._transport.write(token)
        else:
            self._leave()
            self._counts.closed()
            self._transport.write(token)
            self._transport.write(_FINISH + _usage(self._asked) + _END)

    def _leave(self) -> None:
        if self._wheel is not None and self._slot is not None:
            self._wheel.take(self, self._slot)
            self._slot = None


def _whole(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


async def serve(port: int, period_s: float) -> None:
    wheel = Wheel(period_s) if period_s else None
    loop = asyncio.get_running_loop()
    counts = Counts()
    server = await loop.create_server(lambda: Stream(wheel, counts), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))


if __name__ == "__main__":
    main()
