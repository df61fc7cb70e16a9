"""LoRA adapters loaded in vLLM, by name, and the requests that use them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.engines.external.loras import LoadedLoras, LoraUsers

_STEPS = {"0": "/.", "1": "//."}


class Adapters(LoadedLoras[Any]):
    """vLLM's LoRARequest per adapter.

    vLLM identifies adapters by numbers, which are never reused here, and blocks by the adapter's name and path.
    """

    def __init__(self, is_open: Callable[[RequestId], bool]) -> None:
        """`is_open`: whether a request may still be computed."""
        super().__init__()
        self._loading: set[str] = set()
        self._users = LoraUsers[int](is_open)
        """Requests by adapter number."""
        self._num_loads: Counter[tuple[str, str]] = Counter()
        """How often each was loaded, by name and path."""
        self._number = 0
        self._unused: set[int] = set()
        """Numbers of unloaded adapters that vLLM may still have."""

    def name_of(self, number: int | str) -> str | None:
        return next((name for name, each in self.items() if each.lora_int_id == number), None)

    def add_user(self, request_id: RequestId, name: str | None) -> None:
        adapter = self.find(name)
        if adapter is not None:
            self._users.add(request_id, adapter.lora_int_id)

    async def load(self, core: Any, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        if self._is_taken(name):
            raise InvalidRequest(f"an adapter {name!r} is loaded already", param="name")
        self._number += 1
        self._loading.add(name)
        try:
            adapter = LoRARequest(
                lora_name=name, lora_int_id=self._number, lora_path=self._unique_path(name, path)
            )
            is_loaded = await core.add_lora_async(adapter)
        except Exception as error:  # its loader raises many types
            raise InvalidRequest(f"vLLM cannot load the adapter: {error}", param="path") from error
        finally:
            self._loading.discard(name)
        if not is_loaded:
            raise InvalidRequest("vLLM did not load the adapter", param="path")
        self._num_loads[name, path] += 1
        self[name] = adapter

    def _is_taken(self, name: str) -> bool:
        return name in self._loading or name in self

    def _unique_path(self, name: str, path: str) -> str:
        """A path that no earlier load used.

        vLLM caches blocks by the adapter's name and path, and an adapter loaded again may have other weights. Another
        spelling of the same folder encodes the number of loads in binary. Hub names do not change.
        """
        num_loads = self._num_loads[name, path]
        if not num_loads or not Path(path).expanduser().is_dir():
            return path
        return path + "".join(_STEPS[digit] for digit in f"{num_loads:b}")

    async def unload(self, core: Any, name: str) -> None:
        """Unload once no request uses the adapter. If cancelled before that, the adapter is available again, unless
        another one was loaded under its name."""
        adapter = self.remove(name)  # new requests cannot use it
        # Wait for running requests: vLLM would reload missing adapter files for them and crash.
        try:
            await self._users.wait_unused(adapter.lora_int_id)
        except asyncio.CancelledError:
            if self._is_taken(name):
                self._unused.add(adapter.lora_int_id)  # the name is in use again
            else:
                self[name] = adapter
            raise
        self._unused.add(adapter.lora_int_id)
        await self._remove_unused(core)

    async def _remove_unused(self, core: Any) -> None:
        """Remove unused adapters; also repeats interrupted removals, which is harmless."""
        for number in sorted(self._unused, reverse=True):
            if not self._users.is_used(number):
                await core.remove_lora_async(number)
                self._unused.discard(number)
