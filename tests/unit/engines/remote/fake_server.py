"""A server in the test's own loop: what real ones answered, byte by byte, with faults in between.

`FakeServer` plays recorded answers (`data/`, made by record.py). `ModelServer` computes: a language model of a few
lines whose next token is a function of all before it and the seed, as a real one's is, in either server's words.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import EOS, tokenizer_json

DATA = Path(__file__).parent / "data"
PATHS = {
    "/v1/models": "models",
    "/health": "health",
    "/metrics": "metrics",
    "/server_info": "server-info",
    "/v1/completions": "greedy",
    "/generate": "greedy",
}
CONTEXT = 256
VOCABULARY = 700


def recorded(kind: str, name: str) -> bytes:
    """As it came, but on a connection that stays."""
    return (DATA / kind / f"{name}.http").read_bytes().replace(b"connection: close\r\n", b"")


def model_folder(folder: Path, eos: int = EOS) -> Path:
    """All that a card is made from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "config.json").write_bytes(msgspec.json.encode({"eos_token_id": eos}))
    return folder


def plain(status: int, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


def plays(data: bytes, piece_bytes: int | None = None) -> Behaviour:
    """In pieces, each read by itself."""

    async def play(writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), piece_bytes or len(data)):
            writer.write(data[at : at + (piece_bytes or len(data))])
            await writer.drain()
            await asyncio.sleep(0)

    return play


def cuts(data: bytes) -> Behaviour:
    """Says so much, and hangs up."""

    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return cut


def hangs(data: bytes = b"") -> Behaviour:
    """Says so much, and nothing more until the other side goes."""

    async def hang(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        await asyncio.get_running_loop().create_future()

    return hang


class FakeServer:
    """`async with` it. What it is to do comes from `script` by path, and is what was recorded where that is empty."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.script: dict[str, deque[Behaviour]] = {}
        self.always: dict[str, Behaviour] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Paths and bodies, without those of probes."""
        self.num_connections = 0
        self.hung_up = asyncio.Event()
        """A client has closed a connection in the middle of an answer."""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: dict[asyncio.Task[None], None] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def then(self, path: str, *behaviours: Behaviour) -> None:
        self.script.setdefault(path, deque()).extend(behaviours)

    async def start(self) -> None:
        """Again on the same port, where it was there before: somebody else may have it for a moment."""
        async with asyncio.timeout(10):
            while self._server is None:
                try:
                    self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                    await asyncio.sleep(0.05)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a process that is killed: listener and connections go at once."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> FakeServer:
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
                    self.asked.append((path, msgspec.json.decode(body)))
                await self._answer(path, body, reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.pop(task, None)
            writer.transport.abort()

    async def _answer(
        self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until it is said, or the client has gone."""
        saying = asyncio.ensure_future(self.behaviour(path, body)(writer))
        leaving = asyncio.ensure_future(_until_gone(reader))
        try:
            await asyncio.wait([saying, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not saying.done():
                self.hung_up.set()
                raise ConnectionError
        finally:
            saying.cancel()
            leaving.cancel()
            await asyncio.gather(saying, leaving, return_exceptions=True)

    def behaviour(self, path: str, body: bytes) -> Behaviour:
        if self.script.get(path):
            return self.script[path].popleft()
        if path in self.always:
            return self.always[path]
        name = PATHS.get(path)
        if name is None:
            return plays(plain(404, b'{"detail":"Not Found"}'))
        return plays(recorded(self.kind, name))


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
    """A client says nothing while it waits, so the end of its side is the next thing to happen."""
    while not reader.at_eof():
        if reader._buffer:  # the next request, of a client that did not wait
            await asyncio.get_running_loop().create_future()
        await reader._wait_for_data("until_gone")


class ModelServer(FakeServer):
    """See the module."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.num_running = 0

    def behaviour(self, path: str, body: bytes) -> Behaviour:
        if path in ("/v1/completions", "/generate"):
            asked = msgspec.json.decode(body)
            return self._completion(asked) if path == "/v1/completions" else self._generate(asked)
        if path == "/v1/models":
            model = {"id": "model", "root": "nowhere", "owned_by": self.kind, "max_model_len": CONTEXT}
            return plays(plain(200, msgspec.json.encode({"data": [model]})))
        if path == "/metrics" and self.kind == "vllm":
            text = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n'
            return plays(plain(200, text.encode(), "text/plain"))
        if path == "/server_info" and self.kind == "sglang":
            told = {"page_size": 16, "max_total_num_tokens": 8192}
            return plays(plain(200, msgspec.json.encode(told)))
        return super().behaviour(path, body)

    def _completion(self, asked: dict[str, Any]) -> Behaviour:
        assert asked["stream"]
        assert asked["return_token_ids"]

        async def events() -> AsyncIterator[Any]:
            num_top = asked.get("logprobs")
            stops = asked.get("stop_token_ids", ())
            async for token, finish in self._tokens(
                asked["prompt"], asked.get("seed"), asked, stops, asked["max_tokens"], asked["min_tokens"]
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

    def _generate(self, asked: dict[str, Any]) -> Behaviour:
        assert asked["stream"]
        params = asked["sampling_params"]

        async def events() -> AsyncIterator[Any]:
            ids: list[int] = []
            num_top = asked.get("top_logprobs_num", 0)
            # As SGLang: no stop tokens with ignore_eos, and the length goes before all.
            stops = () if params["ignore_eos"] else params.get("stop_token_ids", ())
            async for token, finish in self._tokens(
                asked["input_ids"],
                params.get("sampling_seed"),
                params,
                stops,
                params["max_new_tokens"],
                params["min_new_tokens"],
            ):
                ids.append(token)
                told = None
                if finish is not None:
                    is_length = len(ids) == params["max_new_tokens"]
                    told = {"type": "length"} if is_length else {"type": "stop", "matched": token}
                meta = {"completion_tokens": len(ids), "finish_reason": told, "cached_tokens": 0}
                if asked.get("return_logprob"):
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
        asked: dict[str, Any],
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
                is_end = (token == EOS and not asked["ignore_eos"]) or token in stops
                yield token, "stop" if is_end else "length" if number == max_tokens else None
                if is_end:
                    return
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1


def next_token(context: Iterable[int], seed: int) -> int:
    """One in twenty-four ends a text."""
    drawn = blake2b(msgspec.msgpack.encode((list(context), seed)), digest_size=4).digest()
    number = int.from_bytes(drawn, "big")
    return EOS if number % 24 == 0 else 3 + number // 24 % (VOCABULARY - 4)


def length_of_answer(prompt: Iterable[int], seed: int) -> int:
    """How many tokens come before an end, that one included."""
    context = list(prompt)
    for number in range(1, 200):
        context.append(next_token(context, seed))
        if context[-1] == EOS:
            return number
    raise ConfigError("no end")


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
