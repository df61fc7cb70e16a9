"""A server that answers by script, with known delays: on the virtual network or on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"

HANG_UP = None
"""A step of a script: close the connection."""

Script = Sequence[float | bytes | None]
"""Seconds to wait, bytes to send, or HANG_UP."""


@dataclass(frozen=True)
class Heard:
    """One request as the server got it."""

    at_s: float
    connection: int
    path: str
    head: str
    body: dict[str, Any]


Scripter = Callable[[int, Heard], Script]


def event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(text: str, **choice: Any) -> bytes:
    return event(
        {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]}
    )


ROLE = event(
    {
        "id": "x",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
    }
)
FINISH = event({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
DONE = event("[DONE]")


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event(
        {
            "id": "x",
            "choices": [],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details},
        }
    )


def answer(
    num_tokens: int, first_s: float = 0.1, gap_s: float = 0.02, prompt: int = 7
) -> list[float | bytes | None]:
    """A whole streamed answer; the role comes at once, as with servers that begin before they compute."""
    script: list[float | bytes | None] = [STREAM_HEAD + chunk(ROLE), first_s]
    for number in range(num_tokens):
        script += [chunk(token(f" w{number}")), gap_s]
    script.pop()
    return [*script, chunk(FINISH) + chunk(usage(prompt, num_tokens)) + chunk(DONE) + END]


def plain(
    status: int, body: bytes, kind: str = "application/json", more: str = ""
) -> list[float | bytes | None]:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return [head.encode() + body]


def models(*names: str) -> list[float | bytes | None]:
    return plain(200, json.dumps({"data": [{"id": name} for name in names]}).encode())


@dataclass
class ScriptedServer:
    """Plays `script(number of the request, request)` for each request; /models is answered apart."""

    script: Scripter
    names: tuple[str, ...] = ("tiny",)
    heard: list[Heard] = field(default_factory=list)
    connections: list[_Connection] = field(default_factory=list)
    on_accept: Callable[[_Connection], None] = lambda connection: None

    def protocol(self) -> asyncio.Protocol:
        connection = _Connection(self, len(self.connections))
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer, number: int) -> None:
        self._server = server
        self._number = number
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._steps: list[float | bytes | None] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.on_accept(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lines = head.decode().split("\r\n")
        length = next(
            (int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")), 0
        )
        if len(rest) < length:
            return
        self._buffer = b""
        server = self._server
        heard = Heard(
            asyncio.get_running_loop().time(),
            self._number,
            lines[0].split(" ")[1],
            head.decode(),
            json.loads(rest) if rest else {},
        )
        if heard.path.endswith("/models"):
            self._steps = models(*server.names)
        else:
            server.heard.append(heard)
            self._steps = list(server.script(len(server.heard) - 1, heard))
        self._play()

    def _play(self) -> None:
        self._timer = None
        while self._steps and self._transport is not None:
            step = self._steps.pop(0)
            if step is None:
                self._transport.close()
            elif isinstance(step, bytes):
                self._transport.write(step)
            elif step > 0:
                self._timer = asyncio.get_running_loop().call_later(step, self._play)
                return
