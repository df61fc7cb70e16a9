"""Port of a connection: the server that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from kvolt.runtime.http.protocol import HttpLimits, HttpRequest, Response
from kvolt.runtime.http.reader import BodyBudget
from kvolt.runtime.http.writer import AnyResponse, TickWrites

C_contra = TypeVar("C_contra", contravariant=True)
"""The server's class of connections."""


class ConnectionOwner(Protocol[C_contra]):
    """Interface of the server that a connection needs."""

    limits: HttpLimits
    draining: bool
    bodies: BodyBudget
    tick: TickWrites

    def admit(self, connection: C_contra) -> bool: ...

    def remove_connection(self, connection: C_contra) -> None: ...

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]: ...

    def failure(self, error: BaseException, request: HttpRequest) -> Response:
        """Log an error and return the response to its request, as `respond` would."""
        ...

    async def respond(self, request: HttpRequest) -> AnyResponse: ...

    def observe(self, method: str, status: int, started: float) -> None: ...

    def now(self) -> float: ...

    def date_line(self) -> str: ...

    def identify(self, request: HttpRequest | None) -> str:
        """Return the id of a request, or a new id for one that could not be read."""
        ...
