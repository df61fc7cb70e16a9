"""A server that plays what real ones answered, byte by byte (`data/`, made by record.py), with faults in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from kvolt.core.errors import ConfigError
from kvolt.engines.sim.model import EOS
from kvolt.testing.model_server import Behaviour, ScriptedServer, next_token, plays

DATA = Path(__file__).parent / "data"
PATHS = {
    "/v1/models": "models",
    "/health": "health",
    "/metrics": "metrics",
    "/server_info": "server-info",
    "/v1/completions": "greedy",
    "/generate": "greedy",
}


def recorded(kind: str, name: str) -> bytes:
    """As it came, but on a connection that stays."""
    return (DATA / kind / f"{name}.http").read_bytes().replace(b"connection: close\r\n", b"")


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


class FakeServer(ScriptedServer):
    """Answers what was recorded where there is no script."""

    def behaviour(self, path: str, body: bytes) -> Behaviour:
        name = PATHS.get(path)
        if self.script.get(path) or path in self.always or name is None:
            return super().behaviour(path, body)
        return plays(recorded(self.kind, name))


def length_of_answer(prompt: Iterable[int], seed: int) -> int:
    """How many tokens come before an end, that one included."""
    context = list(prompt)
    for number in range(1, 200):
        context.append(next_token(context, seed))
        if context[-1] == EOS:
            return number
    raise ConfigError("no end")
