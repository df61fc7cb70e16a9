"""Response of the HTTP client as a coroutine reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec

from kvolt.core.errors import KvoltError, ProtocolError


class Fetched(msgspec.Struct, frozen=True):
    status: int
    body: bytes


@dataclass(slots=True, eq=False)
class StreamedResponse:
    """A response read by a coroutine: iterate over the parts of its body, or `read` it."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    _pieces: deque[bytes] = field(default_factory=deque)
    _is_complete: bool = False
    _error: KvoltError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_head(self) -> None:
        while not self.status:
            await self._wait()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._is_complete:
                raise StopAsyncIteration
            await self._wait()
        return self._pieces.popleft()

    async def read(self, max_bytes: int) -> bytes:
        """Read the rest of the body. Raises ProtocolError if it is longer."""
        parts, num_bytes = [], 0
        async for piece in self:
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise ProtocolError(f"the response exceeds {max_bytes} bytes", rule="http body")
            parts.append(piece)
        return b"".join(parts)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    # --- Receiver

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self._changed.set()

    def data(self, pieces: list[bytes], now: float) -> None:
        self._pieces += pieces
        self._changed.set()

    def end(self, now: float) -> None:
        self._is_complete = True
        self._changed.set()

    def fail(self, error: KvoltError) -> None:
        self._error = error
        self._changed.set()
