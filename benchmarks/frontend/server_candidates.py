"""The servers that `benchmarks.frontend.servers` compares: NAME PORT."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"tiny","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
STEP_S = 0.002


class Ticker:
    """Gives every member one event per step."""

    def __init__(self) -> None:
        self._members: dict[Any, int] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, tell: Callable[[bool], None], tokens: int) -> None:
        self._members[tell] = tokens
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for tell, left in list(self._members.items()):
                if left == 1:
                    del self._members[tell]
                else:
                    self._members[tell] = left - 1
                tell(left == 1)


TICKER = Ticker()


class Mailbox:
    """A task's events, one at a time, for servers with an async interface."""

    def __init__(self, tokens: int) -> None:
        self._num_waiting = 0
        self._num_left = tokens
        self._waiter: asyncio.Future[None] | None = None
        TICKER.add(self._tell, tokens)

    def _tell(self, last: bool) -> None:
        self._num_waiting += 1
        if self._waiter is not None:
            self._waiter.set_result(None)
            self._waiter = None

    async def each(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        while self._num_left:
            if not self._num_waiting:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._num_waiting -= 1
            self._num_left -= 1
            await send(EVENT)


async def serve_kvolt(port: int) -> None:
    from kvolt.runtime.clock import SystemClock
    from kvolt.runtime.http.server import HttpRequest, HttpServer, Routes, WrittenResponse
    from kvolt.runtime.http.writer import ResponseWriter
    from kvolt.runtime.network import SocketNetwork

    async def handle(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            done = asyncio.get_running_loop().create_future()

            def tell(last: bool) -> None:
                writer.write(EVENT)
                if last:
                    done.set_result(None)

            TICKER.add(tell, int(request.query_string))
            await done

        return WrittenResponse(produce)

    routes = Routes()
    routes.add("POST", "/", handle)
    await HttpServer(SocketNetwork(), routes, SystemClock()).start(f"127.0.0.1:{port}")
    await asyncio.get_running_loop().create_future()


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(event: bytes) -> None:
        await send({"type": "http.response.body", "body": event, "more_body": True})

    await Mailbox(int(scope["query_string"])).each(write)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def rsgi(scope: Any, protocol: Any) -> None:
    await protocol()
    transport = protocol.response_stream(200, [("content-type", "text/event-stream")])
    await Mailbox(int(scope.query_string)).each(transport.send_bytes)


def main() -> None:
    name, port = sys.argv[1], int(sys.argv[2])
    if name == "kvolt":
        import uvloop

        uvloop.run(serve_kvolt(port))
    elif name == "uvicorn":
        import uvicorn

        uvicorn.run(
            asgi,
            port=port,
            loop="uvloop",
            http="httptools",
            log_level="warning",
            access_log=False,
            lifespan="off",
        )
    else:
        from granian import Granian
        from granian.constants import Interfaces, Loops

        target = "benchmarks.frontend.server_candidates:rsgi"
        Granian(
            target, port=port, interface=Interfaces.RSGI, loop=Loops.uvloop, workers=1, log_enabled=False
        ).serve()


if __name__ == "__main__":
    main()
