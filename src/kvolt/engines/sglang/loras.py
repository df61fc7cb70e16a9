"""Adapters: LoRA adapters that SGLang has, by name, and the requests that use them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from kvolt.core.errors import EngineFailed, InvalidRequest, NotFound, Unsupported
from kvolt.core.ids import RequestId
from kvolt.engines.sglang.messages import LoadLora, UnloadLora

_LOOK_S = 0.02

Ask = Callable[[Callable[[int], LoadLora | UnloadLora]], Awaitable[str | None]]
"""Sends a call of a number, and waits for why it was refused, if it was."""


class Adapters:
    """See the module."""

    def __init__(self, ask: Ask, is_open: Callable[[RequestId], bool]) -> None:
        self._ask = ask
        self._is_open = is_open
        self._paths: dict[str, str] = {}
        self._users: dict[RequestId, str] = {}
        """Some of them may be over."""
        self.is_enabled = False

    def begin(self, paths: Mapping[str, str], is_enabled: bool) -> None:
        """Those that SGLang has loaded at its start."""
        self._paths = dict(paths)
        self.is_enabled = is_enabled

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def check(self, name: str | None) -> None:
        if name and name not in self._paths:
            known = ", ".join(self._paths) or "none"
            raise InvalidRequest(f"no adapter {name!r} is loaded (there are: {known})", param="lora")

    def use(self, request_id: RequestId, name: str | None) -> None:
        if name:
            self._users = {each: used for each, used in self._users.items() if self._is_open(each)}
            self._users[request_id] = name

    async def load(self, name: str, path: str) -> None:
        self._check_enabled()
        if self._paths.get(name) == path:
            return
        if name in self._paths:
            raise InvalidRequest(f"another adapter is loaded as {name!r}", param="name")
        error = await self._ask(lambda call: LoadLora(call, name, path))
        if error is not None:
            raise InvalidRequest(f"SGLang does not take the adapter: {error}", param="path")
        self._paths[name] = path

    async def unload(self, name: str) -> None:
        self._check_enabled()
        if name not in self._paths:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)
        path = self._paths.pop(name)  # no more requests for it
        # Those that run end with it: SGLang would take it from them.
        while self._is_used(name):  # noqa: ASYNC110 - a request's end rings no bell here
            await asyncio.sleep(_LOOK_S)
        error = await self._ask(lambda call: UnloadLora(call, name))
        if error is not None:
            self._paths[name] = path
            raise EngineFailed(f"SGLang keeps the adapter: {error}", engine="sglang")

    def _is_used(self, name: str) -> bool:
        return any(used == name and self._is_open(each) for each, used in self._users.items())

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise Unsupported("this SGLang runs without engine_args.enable_lora", feature="lora")
