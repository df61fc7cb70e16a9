"""An engine with adapters that exist in name only, for tests of everything around them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.unit.engines.lab import MODEL, ScriptedEngine

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.request import Request

BROKEN = "/broken"
CRASHING = "/crashing"


class WithAdapters(ScriptedEngine):
    """Has these adapters at its start, and answers every request at once. `card` are fields of its card."""

    def __init__(self, *names: str, model: str = MODEL, **card: Any) -> None:
        super().__init__(model)
        self.adapters = dict.fromkeys(names, "/at/start")
        self._card = card

    @property
    def card(self) -> ModelCard:
        return replace(self._inner.card, **self._card)

    async def start(self) -> EngineInfo:
        return replace(await self._inner.start(), card=card_hash(self.card))

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.put(StepOutput(((request.request_id, Delta((300,), finish=FinishReason.LENGTH)),)))

    async def load_lora(self, name: str, path: str) -> None:
        if path == BROKEN:
            raise InvalidRequest(f"{path} is no adapter", param="path")
        if path == CRASHING:
            raise KeyError("lora_A")
        self.adapters[name] = path

    async def unload_lora(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise NotFound(f"no adapter {name!r}", kind="lora", name=name)

    def loras(self) -> tuple[str, ...]:
        return tuple(self.adapters)
