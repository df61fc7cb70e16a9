"""Adapters by name, each with the number by which TensorRT-LLM knows it. It loads one when a request first names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import InvalidRequest
from kvolt.engines.external.loras import LoadedLoras


@dataclass(slots=True)
class Adapters:
    """See the module. A number is used once: what is cached under it is not found by another adapter."""

    loaded: LoadedLoras[Any] = field(default_factory=LoadedLoras)
    """Each as a LoRARequest of TensorRT-LLM's."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, name: str, path: str) -> None:
        """InvalidRequest for a folder that is not there, or a name that is another one's."""
        from tensorrt_llm.llmapi import LoRARequest

        known = self.loaded.get(name)
        if known is not None:
            if known.lora_path != path:
                raise InvalidRequest(f"adapter {name!r} is loaded from {known.lora_path}", param="lora")
            return
        try:
            self.loaded.add(name, LoRARequest(name, next(self._numbers), path))
        except ValueError as error:
            raise InvalidRequest(f"TensorRT-LLM refuses adapter {name!r}: {error}", param="lora") from error
