"""Streams that are read while a worker behind them is killed: what each client saw, and when.

Reads cost next to nothing while they come: time and bytes are kept, and looked at afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from benchmarks.frontend import tiny_model
from benchmarks.harness import BrokenRun

_EVENT = b"data: "
_LAST_EVENT = b"data: [DONE]"
_WAIT_S = 120.0


class Seen(msgspec.Struct, frozen=True):
    """One answer, as its client saw it."""

    is_whole: bool
    """It ended as answers end, without an error in it."""
    num_tokens: int
    text: str
    worst_gap_s: float
    error: str | None = None


@dataclass(slots=True, eq=False)
class Reading:
    """One answer on its way."""

    request: bytes
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    num_events: int = 0

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(self.request)
            while data := await reader.read(1 << 16):
                self.reads.append((time.perf_counter(), data))
                self.num_events += data.count(_EVENT)
        except OSError:
            pass  # what came until then is all there is
        finally:
            writer.close()

    def seen(self) -> Seen:
        events = _events(b"".join(data for _, data in self.reads))
        text, num_tokens, error = [], 0, None
        for event in events:
            body = json.loads(event)
            if "error" in body or "choices" not in body:
                error = str(body)[:200]
                continue
            text += [choice.get("delta", {}).get("content") or "" for choice in body["choices"]]
            num_tokens = (body.get("usage") or {}).get("completion_tokens", num_tokens)
        times = [at for at, data in self.reads if _EVENT in data]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        is_whole = error is None and any(_LAST_EVENT in data for _, data in self.reads)
        return Seen(is_whole, num_tokens, "".join(text), max(gaps, default=0.0), error)


def chat(prompt: str, max_tokens: int) -> bytes:
    """A whole HTTP request, for a connection of its own."""
    fields: dict[str, Any] = {
        "model": tiny_model.NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_all(
    port: int, requests: Sequence[bytes], strike_at: int = 0, strike: Callable[[], None] | None = None
) -> list[Seen]:
    """All answers at once. When each has so many events, something happens."""
    readings = [Reading(request) for request in requests]
    running = [asyncio.ensure_future(reading.run(port)) for reading in readings]
    try:
        async with asyncio.timeout(_WAIT_S):
            if strike is not None:
                while not all(reading.num_events >= strike_at for reading in readings):
                    if any(task.done() for task in running):
                        raise BrokenRun("an answer ended before anything happened: it is too short")
                    await asyncio.sleep(0.005)
                strike()
            await asyncio.gather(*running)
    except TimeoutError:
        for task in running:
            task.cancel()
    return [reading.seen() for reading in readings]


def _events(raw: bytes) -> list[bytes]:
    """The events of a response but the last; of one that is no stream its whole body."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    body = _joined(rest) if b"chunked" in head.lower() else rest
    if not head.startswith(b"HTTP/1.1 200"):
        return [body] if body.startswith(b"{") else [json.dumps({"error": head.decode()}).encode()]
    events = [line[len(_EVENT) :] for line in body.split(b"\n") if line.startswith(_EVENT)]
    return [event.strip() for event in events if event.strip() != b"[DONE]"]


def _joined(chunks: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while (end := chunks.find(b"\r\n", at)) > 0:
        size = int(chunks[at:end].split(b";")[0], 16)
        if not size:
            break
        parts.append(chunks[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)
