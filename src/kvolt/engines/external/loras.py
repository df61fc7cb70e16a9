"""The adapters that an engine of others has: by name, with what is kept of each (LoadedLoras), and the requests that
use them (LoraUsers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import RequestId

T = TypeVar("T")

_LOOK_S = 0.02


@dataclass(slots=True)
class LoadedLoras(Generic[T]):
    """See the module. How one is loaded, and what of it is kept, is the adapter's affair."""

    _known: dict[str, T] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """In order of loading."""
        return tuple(self._known)

    def get(self, name: str) -> T | None:
        return self._known.get(name)

    def find(self, name: str | None) -> T | None:
        """None for a request that names none. InvalidRequest for an adapter that is not here."""
        if not name:
            return None
        if name not in self._known:
            known = ", ".join(self._known) or "none"
            raise InvalidRequest(f"no adapter {name!r} is loaded (there are: {known})", param="lora")
        return self._known[name]

    def name_of(self, is_it: Callable[[T], bool]) -> str | None:
        return next((name for name, kept in self._known.items() if is_it(kept)), None)

    def add(self, name: str, kept: T) -> None:
        self._known[name] = kept

    def take(self, name: str) -> T:
        """What was kept; no more requests find it. NotFound."""
        if name not in self._known:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)
        return self._known.pop(name)


@dataclass(slots=True)
class LoraUsers(Generic[T]):
    """Which requests use which adapters. An engine must not lose one that some of them run with."""

    is_open: Callable[[RequestId], bool]
    """Whether a request may still be computed."""
    _used: dict[RequestId, T] = field(default_factory=dict)
    """By what the engine knows it by; some of the requests may be over."""

    def add(self, request_id: RequestId, adapter: T) -> None:
        self._used = {each: used for each, used in self._used.items() if self.is_open(each)}
        self._used[request_id] = adapter

    def has(self, adapter: T) -> bool:
        return any(used == adapter and self.is_open(each) for each, used in self._used.items())

    async def gone(self, adapter: T) -> None:
        """Until none is left."""
        while self.has(adapter):  # noqa: ASYNC110 - a request's end rings no bell here
            await asyncio.sleep(_LOOK_S)
