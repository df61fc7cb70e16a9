"""Adapters by name, each with the number by which TensorRT-LLM knows it. It loads one when a request first names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import InvalidRequest, NotFound


@dataclass(slots=True)
class Adapters:
    """See the module. A number is used once: what is cached under it is not found by another adapter."""

    _known: dict[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._known)

    def add(self, name: str, path: str) -> None:
        """InvalidRequest for a folder that is not there, or a name that is another one's."""
        from tensorrt_llm.llmapi import LoRARequest

        known = self._known.get(name)
        if known is not None:
            if known.lora_path != path:
                raise InvalidRequest(f"adapter {name!r} is loaded from {known.lora_path}", param="lora")
            return
        try:
            self._known[name] = LoRARequest(name, next(self._numbers), path)
        except ValueError as error:
            raise InvalidRequest(f"TensorRT-LLM refuses adapter {name!r}: {error}", param="lora") from error

    def remove(self, name: str) -> None:
        if self._known.pop(name, None) is None:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)

    def find(self, name: str | None) -> Any:
        """None for a request that names none. InvalidRequest for an adapter that is not here."""
        if not name:
            return None
        found = self._known.get(name)
        if found is None:
            known = ", ".join(self._known) or "none"
            raise InvalidRequest(f"no adapter {name!r} is loaded (there are: {known})", param="lora")
        return found
