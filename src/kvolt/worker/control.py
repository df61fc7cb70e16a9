"""Control endpoint of a worker: its messages, and how an engine answers them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.errors import Unavailable, Unsupported
from kvolt.core.kv_recovery import KvAnswer, KvQuestion
from kvolt.core.withdrawal import Withdraw
from kvolt.engines.contract import Engine, KvEvents, Lora
from kvolt.worker.kv_event_publisher import KvJournal


class ClearKv(msgspec.Struct, frozen=True, tag="clear_kv"):
    """Forget all cached KV blocks."""


class LoadLora(msgspec.Struct, frozen=True, tag="load_lora"):
    name: str
    path: str


class UnloadLora(msgspec.Struct, frozen=True, tag="unload_lora"):
    name: str


class ListFeatures(msgspec.Struct, frozen=True, tag="list"):
    """What the engine offers, and its adapters."""


WorkerCommand = ClearKv | LoadLora | UnloadLora | ListFeatures
ControlRequest = WorkerCommand | KvQuestion | Withdraw
"""All that the control endpoint takes: what operators want done, what routers want to know (`kv_recovery`), and which
request somebody wants back (`withdrawal`)."""


class WorkerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the engine stands after the command."""

    features: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    cleared_blocks: int | None = None


async def perform(engine: Engine, features: tuple[str, ...], command: WorkerCommand) -> WorkerAnswer:
    """Unsupported when the engine does not offer it; the engine's own errors otherwise."""
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
    return WorkerAnswer(features, loras_of(engine, features), cleared)


def recall(journal: KvJournal | None, info: EngineInfo | None, question: KvQuestion) -> Iterator[KvAnswer]:
    """What a router is answered about our blocks."""
    if info is not None and not info.tells_kv:
        raise Unsupported("this engine does not tell which blocks it holds", feature="kv_events")
    if journal is None:
        raise Unavailable("this worker is about to start", reason="starting")
    return journal.answer(question)


def loras_of(engine: Engine, features: tuple[str, ...]) -> tuple[str, ...]:
    """Names of its adapters; none where it takes none."""
    return engine.loras() if isinstance(engine, Lora) and "Lora" in features else ()


def _kv_events(engine: Engine, features: tuple[str, ...]) -> KvEvents:
    if "KvEvents" not in features or not isinstance(engine, KvEvents):
        raise Unsupported("this engine has no KV blocks that can be cleared", feature="clear_kv_blocks")
    return engine


def _lora(engine: Engine, features: tuple[str, ...]) -> Lora:
    if "Lora" not in features or not isinstance(engine, Lora):
        raise Unsupported("this engine takes no adapters", feature="lora")
    return engine
