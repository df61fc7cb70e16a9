"""LoadedLoras: the adapters that an engine of others has, by name, and what is kept of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvolt.core.errors import InvalidRequest, NotFound

T = TypeVar("T")


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

    def add(self, name: str, kept: T) -> None:
        self._known[name] = kept

    def take(self, name: str) -> T:
        """What was kept; no more requests find it. NotFound."""
        if name not in self._known:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)
        return self._known.pop(name)
