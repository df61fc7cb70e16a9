"""Operators' commands on one worker: drop its KV cache, load and unload LoRA adapters, put its engine to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvolt.core.errors import MALFORMED, InvalidRequest, Unavailable, Unsupported
from kvolt.engines.contract import Engine, Lora, Sleep
from kvolt.runtime.process_control import MAX_CONTROL_S
from kvolt.runtime.runtime import Runtime
from kvolt.worker.adapter_record import AdapterRecord
from kvolt.worker.control import ClearKv, CommandResult, LoadLora, UnloadLora, WorkerCommand, perform
from kvolt.worker.kv.tiering import Tiering

T = TypeVar("T", bound=msgspec.Struct)


class SleepOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sleep`."""

    level: int = 1
    """1: weights to host memory, KV dropped; 2: weights dropped too."""
    timeout_s: float = 30.0
    """Time that running requests get to finish."""


class WakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /wake_up`: vLLM's `tags`, which wake a part of the engine, are not supported."""


class Operations:
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        tiering: Callable[[], Tiering | None],
        adapters: Path | None,
        register_asleep: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`adapters`: file that keeps loaded adapters for the next start."""
        self._runtime = runtime
        self._engine = engine
        self._tiering = tiering
        self._adapters = None if adapters is None else AdapterRecord(adapters, runtime.ports.blocking)
        self._register_asleep = register_asleep
        self._sleep_lock = asyncio.Lock()
        self.features: tuple[str, ...] = ()
        self.is_asleep = False
        runtime.commands |= {"sleep": self.sleep, "wake_up": self.wake_up}
        runtime.check_can_resume = self._check_awake

    async def start(self, features: tuple[str, ...]) -> None:
        """Restore the adapters of the previous run; the engine is started."""
        self.features = features
        if self._adapters is not None and "Lora" in features and isinstance(self._engine, Lora):
            await self._adapters.restore(self._engine)

    async def perform(self, command: WorkerCommand) -> CommandResult:
        result = await perform(self._engine, self.features, command)
        match command:
            case ClearKv() if (tiering := self._tiering()) is not None:
                num_cleared = (result.cleared_blocks or 0) + tiering.clear()
                return msgspec.structs.replace(result, cleared_blocks=num_cleared)
            case LoadLora(name, path) if self._adapters is not None:
                await self._adapters.set_path(name, path)
            case UnloadLora(name) if self._adapters is not None:
                await self._adapters.set_path(name, None)
        return result

    async def clear_kv_blocks(self) -> dict[str, int | None]:
        """Drop all cached blocks and return their number. Unsupported if the engine cannot."""
        return {"cleared_blocks": (await self.perform(ClearKv())).cleared_blocks}

    async def sleep(self, body: bytes) -> dict[str, bool]:
        """Drain the process and put its engine to sleep; if that fails or is cancelled, wake it and accept requests
        again."""
        options = _decode(body, SleepOptions)
        if options.level not in (1, 2) or not 0 <= options.timeout_s <= MAX_CONTROL_S:
            raise InvalidRequest(f"level must be 1 or 2, timeout_s 0 to {MAX_CONTROL_S:g}", param="body")
        engine = self._sleeper()
        async with self._sleep_lock:
            was_asleep = self.is_asleep
            try:
                await self._runtime.drain(options.timeout_s)
                self.is_asleep = True
                await engine.sleep(options.level)
            except BaseException:  # also a client that leaves
                if not was_asleep:
                    await self._accept_again(engine)
                raise
            await self._runtime.cordon()
            await self._register_asleep(True)
        return {"is_sleeping": True}

    async def wake_up(self, body: bytes) -> dict[str, bool]:
        """Wake the engine and accept requests again. A worker that is awake stays as it is, cordoned or not."""
        _decode(body, WakeOptions)
        engine = self._sleeper()
        async with self._sleep_lock:
            if self.is_asleep:
                await self._accept_again(engine)
        return {"is_sleeping": False}

    async def _accept_again(self, engine: Sleep) -> None:
        """Wake the engine, unless its sleep has not started. If that fails, it counts as asleep."""
        if self.is_asleep:
            await engine.wake()
            self.is_asleep = False
        await self._runtime.resume()
        await self._register_asleep(False)

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise Unavailable("the engine is asleep; `kvolt worker wake` wakes it", reason="asleep")

    def _sleeper(self) -> Sleep:
        if "Sleep" not in self.features or not isinstance(self._engine, Sleep):
            raise Unsupported(
                "this engine cannot sleep; vLLM can, on a GPU with --arg engine_args.enable_sleep_mode=true",
                feature="sleep",
            )
        return self._engine


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind, strict=False)
    except MALFORMED as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise InvalidRequest(f"{error} (known fields: {known})", param="body") from None
