"""LoRA adapters by name, with the numbers that TensorRT-LLM uses. It loads an adapter at the first request that uses
it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import InvalidRequest
from kvolt.engines.external.loras import LoadedLoras


@dataclass(slots=True)
class Adapters:
    """See the module. Numbers are never reused, since blocks are cached under them."""

    loaded: LoadedLoras[Any] = field(default_factory=LoadedLoras)
    """TensorRT-LLM's LoRARequest per adapter."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, name: str, path: str) -> None:
        """Add an adapter. InvalidRequest if the folder is missing or the name is in use."""
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
