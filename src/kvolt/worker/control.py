"""Messages of a worker's control endpoint, and their execution."""

from __future__ import annotations

import msgspec

from kvolt.core.endpoints import Withdraw
from kvolt.core.errors import Unsupported
from kvolt.core.kv_recovery import KvRecoveryRequest
from kvolt.engines.contract import Engine, KvEvents, Lora


class ClearKv(msgspec.Struct, frozen=True, tag="clear_kv"):
    """Drop all cached KV blocks."""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    name: str
    path: str


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    name: str


class ListFeatures(msgspec.Struct, frozen=True, tag="list"):
    """List the engine's features and LoRA adapters."""


WorkerCommand = ClearKv | LoadLora | UnloadLora | ListFeatures
ControlRequest = WorkerCommand | KvRecoveryRequest | Withdraw
"""Messages of the control endpoint: operator commands, KV recovery of routers (`core.kv_recovery`) and withdrawals
(`core.endpoints`)."""


class CommandResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of the engine after the command."""

    features: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    cleared_blocks: int | None = None


async def perform(engine: Engine, features: tuple[str, ...], command: WorkerCommand) -> CommandResult:
    """Run a command. Unsupported if the engine lacks the feature; otherwise errors of the engine."""
    cleared: int | None = None
    match command:
        case ClearKv():
            cleared = await _kv_events(engine, features).clear_kv()
        case LoadLora(name, path):
            await _lora(engine, features).load_lora(name, path)
        case UnloadLora(name):
            await _lora(engine, features).unload_lora(name)
        case ListFeatures():
            pass
    return CommandResult(features, adapter_names(engine, features), cleared)


def adapter_names(engine: Engine, features: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the loaded LoRA adapters."""
    return engine.loras() if isinstance(engine, Lora) and "Lora" in features else ()


def _kv_events(engine: Engine, features: tuple[str, ...]) -> KvEvents:
    if "KvEvents" not in features or not isinstance(engine, KvEvents):
        raise Unsupported("this engine cannot clear its KV blocks", feature="clear_kv_blocks")
    return engine


def _lora(engine: Engine, features: tuple[str, ...]) -> Lora:
    if "Lora" not in features or not isinstance(engine, Lora):
        raise Unsupported("this engine does not support LoRA adapters", feature="lora")
    return engine
