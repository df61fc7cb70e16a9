"""LoRA adapters of an external engine by name (LoadedLoras), and the requests that use them (LoraUsers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import RequestId

T = TypeVar("T")

_POLL_S = 0.02


class LoadedLoras(dict[str, T]):
    """Loaded LoRA adapters by name, in order of loading, each with a value of the engine's adapter."""

    def find(self, name: str | None) -> T | None:
        """None for a request without an adapter. InvalidRequest for an adapter that is not loaded."""
        if not name:
            return None
        if name not in self:
            known = ", ".join(self) or "none"
            raise InvalidRequest(f"no adapter {name!r} is loaded (loaded: {known})", param="lora")
        return self[name]

    def remove(self, name: str) -> T:
        """Remove an adapter and return its value. NotFound."""
        if name not in self:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)
        return self.pop(name)


@dataclass(slots=True)
class LoraUsers(Generic[T]):
    """Requests by the adapter that they use; an adapter in use must not be unloaded."""

    is_open: Callable[[RequestId], bool]
    """Whether a request may still be computed."""
    _used: dict[RequestId, T] = field(default_factory=dict)
    """Adapter by request; some of the requests may have ended."""

    def add(self, request_id: RequestId, adapter: T) -> None:
        self._used = {each: used for each, used in self._used.items() if self.is_open(each)}
        self._used[request_id] = adapter

    def is_used(self, adapter: T) -> bool:
        return any(used == adapter and self.is_open(each) for each, used in self._used.items())

    async def wait_unused(self, adapter: T) -> None:
        """Wait until no request uses the adapter."""
        while self.is_used(adapter):  # noqa: ASYNC110 - the end of a request is not signalled
            await asyncio.sleep(_POLL_S)
