"""LoRA adapters loaded in SGLang, by name, and the requests that use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvolt.core.errors import EngineFailed, InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.engines.external.loras import LoadedLoras, LoraUsers
from kvolt.engines.sglang.host.messages import LoadLora, UnloadLora

CallHost = Callable[[Callable[[int], LoadLora | UnloadLora]], Awaitable[str | None]]
"""Sends a call with a number; returns None, or the reason of a refusal."""


class Adapters(LoadedLoras[str]):
    """See the module. Holds the folder of each adapter."""

    def __init__(self, call_host: CallHost, is_open: Callable[[RequestId], bool]) -> None:
        super().__init__()
        self._call_host = call_host
        self._users = LoraUsers[str](is_open)
        self.is_enabled = False

    def add_user(self, request_id: RequestId, name: str | None) -> None:
        if name:
            self._users.add(request_id, name)

    async def load(self, name: str, path: str) -> None:
        self._check_enabled()
        known = self.get(name)
        if known == path:
            return
        if known is not None:
            raise InvalidRequest(f"another adapter is loaded as {name!r}", param="name")
        error = await self._call_host(lambda call: LoadLora(call, name, path))
        if error is not None:
            raise InvalidRequest(f"SGLang cannot load the adapter: {error}", param="path")
        self[name] = path

    async def unload(self, name: str) -> None:
        self._check_enabled()
        path = self.remove(name)  # new requests cannot use it
        await self._users.wait_unused(name)  # SGLang would remove it from running requests
        error = await self._call_host(lambda call: UnloadLora(call, name))
        if error is not None:
            self[name] = path
            raise EngineFailed(f"SGLang did not unload the adapter: {error}", engine="sglang")

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise Unsupported("this SGLang runs without engine_args.enable_lora", feature="lora")
