"""Adapters: LoRA adapters that vLLM has, by name, and the requests that use them."""

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


class Adapters:
    """vLLM knows them by numbers of ours, of which none is used again, and its blocks by their names and paths."""

    def __init__(self, is_open: Callable[[RequestId], bool]) -> None:
        """`is_open`: whether a request may still be computed."""
        self._loaded = LoadedLoras[Any]()
        """Each as a LoRARequest of vLLM's."""
        self._coming: set[str] = set()
        self._users = LoraUsers[int](is_open)
        """By the adapters' numbers."""
        self._times: Counter[tuple[str, str]] = Counter()
        """How often each was loaded, by its name and path."""
        self._number = 0
        self._left: set[int] = set()
        """Numbers that nobody can ask for, and that vLLM may still have."""

    @property
    def names(self) -> tuple[str, ...]:
        return self._loaded.names

    def find(self, name: str | None) -> Any:
        """None for a request that names none. InvalidRequest for an adapter that is not here."""
        return self._loaded.find(name)

    def name_of(self, number: int | str) -> str | None:
        return self._loaded.name_of(lambda each: each.lora_int_id == number)

    def use(self, request_id: RequestId, name: str | None) -> None:
        adapter = self.find(name)
        if adapter is not None:
            self._users.add(request_id, adapter.lora_int_id)

    async def load(self, core: Any, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        if self._is_taken(name):
            raise InvalidRequest(f"an adapter {name!r} is loaded already", param="name")
        self._number += 1
        self._coming.add(name)
        try:
            adapter = LoRARequest(
                lora_name=name, lora_int_id=self._number, lora_path=self._own_path(name, path)
            )
            is_loaded = await core.add_lora_async(adapter)
        except Exception as error:  # vLLM says what is wrong with it by whatever its loader raises
            raise InvalidRequest(f"vLLM cannot load the adapter: {error}", param="path") from error
        finally:
            self._coming.discard(name)
        if not is_loaded:
            raise InvalidRequest("vLLM has not loaded the adapter", param="path")
        self._times[name, path] += 1
        self._loaded.add(name, adapter)

    def _is_taken(self, name: str) -> bool:
        return name in self._coming or self._loaded.get(name) is not None

    def _own_path(self, name: str, path: str) -> str:
        """Blocks of an adapter are found again by its name and path: one that comes again by the same, perhaps with
        other weights, is given another way to the same folder: how often it came, in binary, by steps that lead
        nowhere. What is fetched from a hub does not change."""
        times = self._times[name, path]
        if not times or not Path(path).expanduser().is_dir():
            return path
        return path + "".join(_STEPS[digit] for digit in f"{times:b}")

    async def unload(self, core: Any, name: str) -> None:
        """Cancelled while requests use it, it is as before, unless another has come by its name; else what is left is
        done with the next one."""
        adapter = self._loaded.take(name)  # no more requests for it
        # Those that run end with it: vLLM would read its files again for them, which may be gone, and die of that.
        try:
            await self._users.gone(adapter.lora_int_id)
        except asyncio.CancelledError:
            if self._is_taken(name):
                self._left.add(adapter.lora_int_id)  # its name is another's by now
            else:
                self._loaded.add(name, adapter)
            raise
        self._left.add(adapter.lora_int_id)
        await self._remove_left(core)

    async def _remove_left(self, core: Any) -> None:
        """Also those whose removal nobody has heard out: to be told twice does no harm."""
        for number in sorted(self._left, reverse=True):
            if not self._users.has(number):
                await core.remove_lora_async(number)
                self._left.discard(number)
