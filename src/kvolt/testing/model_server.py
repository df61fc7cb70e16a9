"""Stand-in for a vLLM or an SGLang server: their HTTP API in front of a language model of a few lines.

The next token is a function of all tokens before it and of the seed. `ModelServer` is for tests of clients of such
servers; `python -m kvolt.testing.model_server` runs one. Its base, `ScriptedServer`, answers as a test says.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvolt.engines.sim.model import CHAT_TEMPLATE, EOS, tokenizer_json
from kvolt.runtime.tasks import TaskGroup

VOCABULARY = 700
_CONTEXT = 256
_PORT_FREE_S = 10.0


def model_folder(folder: Path, eos: int = EOS) -> Path:
    """Write the files that kvolt reads of the server's model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "config.json").write_bytes(msgspec.json.encode({"eos_token_id": eos}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


Behaviour = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


def plays(data: bytes, piece_bytes: int | None = None) -> Behaviour:
    """Answer with `data`, in pieces that arrive one after the other."""

    async def play(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), piece_bytes or len(data)):
            writer.write(data[at : at + (piece_bytes or len(data))])
            await writer.drain()
            await asyncio.sleep(0)

    return play


class ScriptedServer:
    """HTTP server on loopback; use it with `async with`. `script` has the next answers by path, `always` the others."""

    def __init__(self, kind: str, port: int = 0) -> None:
        """`kind`: `vllm` or `sglang`. `port`: 0 picks a free one."""
        self.kind = kind
        self.script: dict[str, deque[Behaviour]] = {}
        self.always: dict[str, Behaviour] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Paths and bodies of requests with a body."""
        self.num_connections = 0
        self.hung_up = asyncio.Event()
        """Set when a client closes a connection during an answer."""
        self._server: asyncio.Server | None = None
        self._port = port
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def then(self, path: str, *behaviours: Behaviour) -> None:
        self.script.setdefault(path, deque()).extend(behaviours)

    async def start(self) -> None:
        """Listen. A server that was stopped uses its port again, which may be taken for a moment."""
        async with asyncio.timeout(_PORT_FREE_S):
            while self._server is None:
                try:
                    self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    await asyncio.sleep(0.05)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close listener and connections at once, as when a process is killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> ScriptedServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        self.num_connections += 1
        try:
            async for path, body in _requests(reader):
                if body:
                    self.requests.append((path, msgspec.json.decode(body)))
                await self._answer(path, body, reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.pop(task, None)
            writer.transport.abort()

    async def _answer(
        self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer, until the client closes the connection."""
        task_group = TaskGroup("model server", on_error=lambda error: None)  # the client sees the end
        answering = task_group.start(self.behaviour(path, body)(writer), "answer")
        closing = task_group.start(_until_gone(reader), "client")
        try:
            await asyncio.wait([answering, closing], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.hung_up.set()
                raise ConnectionError
        finally:
            await task_group.close()

    def behaviour(self, path: str, body: bytes) -> Behaviour:
        if self.script.get(path):
            return self.script[path].popleft()
        if path in self.always:
            return self.always[path]
        return plays(plain(404, b'{"detail":"Not Found"}'))


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    while True:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return
        lines = head.split("\r\n")
        length = next(
            (int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0
        )
        yield lines[0].split(" ")[1], await reader.readexactly(length)


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Wait until the client closes its side: it sends nothing while it waits for an answer."""
    while not reader.at_eof():
        # Reading would consume the next request, if it comes before this task is cancelled.
        if reader._buffer:  # type: ignore[attr-defined]
            await asyncio.get_running_loop().create_future()
        await reader._wait_for_data("until_gone")  # type: ignore[attr-defined]


class ModelServer(ScriptedServer):
    """See the module."""

    def __init__(
        self, kind: str, port: int = 0, folder: str = "nowhere", context_length: int = _CONTEXT
    ) -> None:
        """`folder`: with the tokenizer, as the server reports it."""
        super().__init__(kind, port)
        self._folder = folder
        self._context_length = context_length
        self.num_running = 0

    def behaviour(self, path: str, body: bytes) -> Behaviour:
        if path in ("/v1/completions", "/generate"):
            request = msgspec.json.decode(body)
            if not request.get("stream") or (path != "/generate" and not request.get("return_token_ids")):
                return plays(plain(400, b'{"error":{"message":"only streams of token ids are served"}}'))
            return self._completion(request) if path == "/v1/completions" else self._generate(request)
        if path == "/v1/models":
            model: dict[str, Any] = {"id": "model", "root": self._folder, "owned_by": self.kind}
            model["max_model_len"] = self._context_length
            return plays(plain(200, msgspec.json.encode({"data": [model]})))
        if path == "/health":
            return plays(plain(200, b""))
        if path == "/metrics" and self.kind == "vllm":
            text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n'
            return plays(plain(200, text.encode(), "text/plain"))
        if path == "/server_info" and self.kind == "sglang":
            facts = {"page_size": 16, "max_total_num_tokens": 8192}
            return plays(plain(200, msgspec.json.encode(facts)))
        return super().behaviour(path, body)

    def _completion(self, request: dict[str, Any]) -> Behaviour:
        async def events() -> AsyncIterator[Any]:
            num_top = request.get("logprobs")
            stops = request.get("stop_token_ids", ())
            async for token, finish in self._tokens(
                request["prompt"],
                request.get("seed"),
                request,
                stops,
                request["max_tokens"],
                request["min_tokens"],
            ):
                logprobs = None
                if num_top is not None:
                    top = {f"token_id:{token}": -1.0, f"token_id:{token + 1}": -0.5, "token_id:9999": -2.0}
                    for extra in range(num_top):
                        top[f"token_id:{10_000 + extra}"] = -3.0 - extra
                    logprobs = {
                        "tokens": [f"token_id:{token}"],
                        "token_logprobs": [-1.0],
                        "top_logprobs": [dict(list(top.items())[: num_top + 1])],
                    }
                choice = {"index": 0, "text": "?", "logprobs": logprobs, "token_ids": [token]}
                choice |= {"finish_reason": finish, "stop_reason": token if token in stops else None}
                yield {"choices": [choice]}
            yield {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}

        return _streams(events)

    def _generate(self, request: dict[str, Any]) -> Behaviour:
        params = request["sampling_params"]

        async def events() -> AsyncIterator[Any]:
            ids: list[int] = []
            num_top = request.get("top_logprobs_num", 0)
            # As SGLang: ignore_eos disables stop tokens, and the length takes precedence.
            stops = () if params["ignore_eos"] else params.get("stop_token_ids", ())
            async for token, finish in self._tokens(
                request["input_ids"],
                params.get("sampling_seed"),
                params,
                stops,
                params["max_new_tokens"],
                params["min_new_tokens"],
            ):
                ids.append(token)
                reason = None
                if finish is not None:
                    is_length = len(ids) == params["max_new_tokens"]
                    reason = {"type": "length"} if is_length else {"type": "stop", "matched": token}
                meta: dict[str, Any] = {
                    "completion_tokens": len(ids),
                    "finish_reason": reason,
                    "cached_tokens": 0,
                }
                if request.get("return_logprob"):
                    meta["output_token_logprobs"] = [[-1.0, each, None] for each in ids]
                    meta["output_top_logprobs"] = [
                        [[-0.5 - at, 10_000 + at, None] for at in range(num_top)] for _ in ids
                    ]
                yield {"text": "?", "output_ids": ids, "meta_info": meta}

        return _streams(events)

    async def _tokens(
        self,
        context: list[int],
        seed: int | None,
        request: dict[str, Any],
        stops: Iterable[int],
        max_tokens: int,
        min_tokens: int,
    ) -> AsyncIterator[tuple[int, str | None]]:
        self.num_running += 1
        try:
            for number in range(1, max_tokens + 1):
                token = next_token(context, seed or 0)
                if number <= min_tokens and (token == EOS or token in stops):
                    token = VOCABULARY - 1
                context = [*context, token]
                is_end = (token == EOS and not request["ignore_eos"]) or token in stops
                yield token, "stop" if is_end else "length" if number == max_tokens else None
                if is_end:
                    return
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1


def next_token(context: Iterable[int], seed: int) -> int:
    """The next token; one in 24 ends an answer."""
    digest = blake2b(msgspec.msgpack.encode((list(context), seed)), digest_size=4).digest()
    number = int.from_bytes(digest, "big")
    return EOS if number % 24 == 0 else 3 + number // 24 % (VOCABULARY - 4)


def _streams(events: Callable[[], AsyncIterator[Any]]) -> Behaviour:
    async def stream(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        async for event in events():
            _chunk(writer, b"data: " + msgspec.json.encode(event) + b"\n\n")
            await writer.drain()
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return stream


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder))
        async with ModelServer(args.kind, args.port, folder, args.context_length) as server:
            print(f"stand-in for {args.kind} listening on {server.url}", flush=True)
            await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvolt.testing.model_server", description=__doc__)
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port.")
    parser.add_argument("--context-length", type=int, default=4096)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
