"""Adapters: LoRA adapters that SGLang has, by name, and the requests that use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from kvolt.core.errors import EngineFailed, InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.engines.external.loras import LoadedLoras, LoraUsers
from kvolt.engines.sglang.host.messages import LoadLora, UnloadLora

Ask = Callable[[Callable[[int], LoadLora | UnloadLora]], Awaitable[str | None]]
"""Sends a call of a number, and waits for why it was refused, if it was."""


class Adapters:
    """See the module."""

    def __init__(self, ask: Ask, is_open: Callable[[RequestId], bool]) -> None:
        self._ask = ask
        self._loaded = LoadedLoras[str]()
        """Each with its folder."""
        self._users = LoraUsers[str](is_open)
        self.is_enabled = False

    def begin(self, paths: Mapping[str, str], is_enabled: bool) -> None:
        """Those that SGLang has loaded at its start."""
        for name, path in paths.items():
            self._loaded.add(name, path)
        self.is_enabled = is_enabled

    @property
    def names(self) -> tuple[str, ...]:
        return self._loaded.names

    def check(self, name: str | None) -> None:
        self._loaded.find(name)

    def use(self, request_id: RequestId, name: str | None) -> None:
        if name:
            self._users.add(request_id, name)

    async def load(self, name: str, path: str) -> None:
        self._check_enabled()
        known = self._loaded.get(name)
        if known == path:
            return
        if known is not None:
            raise InvalidRequest(f"another adapter is loaded as {name!r}", param="name")
        error = await self._ask(lambda call: LoadLora(call, name, path))
        if error is not None:
            raise InvalidRequest(f"SGLang does not take the adapter: {error}", param="path")
        self._loaded.add(name, path)

    async def unload(self, name: str) -> None:
        self._check_enabled()
        path = self._loaded.take(name)  # no more requests for it
        await self._users.gone(name)  # those that run end with it: SGLang would take it from them
        error = await self._ask(lambda call: UnloadLora(call, name))
        if error is not None:
            self._loaded.add(name, path)
            raise EngineFailed(f"SGLang keeps the adapter: {error}", engine="sglang")

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise Unsupported("this SGLang runs without engine_args.enable_lora", feature="lora")
