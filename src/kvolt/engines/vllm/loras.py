"""Adapters: LoRA adapters that vLLM has, by name."""

from __future__ import annotations

from typing import Any

from kvolt.core.errors import InvalidRequest, NotFound


class Adapters:
    """vLLM knows them by numbers of ours; a number is never used again, since blocks in its cache may bear it."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._coming: set[str] = set()
        self._number = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._known)

    def find(self, name: str | None) -> Any:
        return None if name is None else self._known[name]

    def name_of(self, number: int | str) -> str | None:
        return next((name for name, each in self._known.items() if each.lora_int_id == number), None)

    def check(self, name: str | None) -> None:
        if name is not None and name not in self._known:
            known = ", ".join(self._known) or "none"
            raise InvalidRequest(f"no adapter {name!r} is loaded (there are: {known})", param="lora")

    async def load(self, core: Any, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest

        if name in self._known or name in self._coming:
            raise InvalidRequest(f"an adapter {name!r} is loaded already", param="name")
        self._number += 1
        self._coming.add(name)
        try:
            adapter = LoRARequest(lora_name=name, lora_int_id=self._number, lora_path=path)
            is_loaded = await core.add_lora_async(adapter)
        except Exception as error:  # vLLM says what is wrong with it by whatever its loader raises
            raise InvalidRequest(f"vLLM cannot load the adapter: {error}", param="path") from error
        finally:
            self._coming.discard(name)
        if not is_loaded:
            raise InvalidRequest("vLLM has not loaded the adapter", param="path")
        self._known[name] = adapter

    async def unload(self, core: Any, name: str) -> None:
        adapter = self._known.pop(name, None)
        if adapter is None:
            raise NotFound(f"no adapter {name!r} is loaded", kind="lora", name=name)
        await core.remove_lora_async(adapter.lora_int_id)
