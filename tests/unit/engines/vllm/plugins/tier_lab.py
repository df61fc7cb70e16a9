"""The halves of the tier connector without a vLLM: its base classes and events, shaped as those of 0.32."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


def _extra_keys(request: Any, start: int, end: int, media: int) -> tuple[Any, int]:
    return ((("cache_salt", request.cache_salt),) if not start and request.cache_salt else None), media


def _untagged(keys: list[Any]) -> list[Any]:
    return [None if each is None else tuple(key[1] for key in each) for each in keys]


_MODULES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        name: type(name, (), {})
        for name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")
    },
    "vllm.distributed.kv_events": {
        "MEDIUM_CPU": "CPU",
        "MEDIUM_STORAGE": "STORAGE",
        "BlockStored": BlockStored,
        "BlockRemoved": BlockRemoved,
    },
    "vllm.v1.core.kv_cache_utils": {
        "generate_block_hash_extra_keys": _extra_keys,
        "maybe_convert_block_hash": lambda name: name,
        "to_event_extra_keys": _untagged,
    },
}


@contextmanager
def stood_in(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """For as long as they are imported: others have a stand-in of their own."""
    before = dict(sys.modules)
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []  # type: ignore[attr-defined]
            sys.modules.setdefault(module.__name__, module)
        sys.modules[name].__dict__.update(content)
    try:
        yield
    finally:
        for name in [each for each in sys.modules if each.split(".")[0] == "vllm"]:
            if name not in before:
                del sys.modules[name]


with stood_in(_MODULES):
    from kvolt.engines.vllm.plugins import tier_messages, tier_scheduler, tier_worker

__all__ = [
    "BLOCK",
    "FakeRequest",
    "Plan",
    "plan",
    "stood_in",
    "tier_messages",
    "tier_scheduler",
    "tier_worker",
]

BLOCK = 4


@dataclass
class FakeRequest:
    """As vLLM's scheduler has it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    cache_salt: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)
        for end in range(BLOCK, len(self.all_token_ids) + 1, BLOCK):
            made = f"{self.cache_salt} {self.all_token_ids[:end]}"
            self.block_hashes.append(sha256(made.encode()).digest())

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


Plan = SimpleNamespace


def plan(new: dict[str, tuple[list[int], int, int]] | None = None, **given: Any) -> Plan:
    """A step, as vLLM has planned it: of new requests their blocks, tokens computed before, and tokens now."""
    news = [
        SimpleNamespace(req_id=request_id, block_ids=(blocks,), num_computed_tokens=done)
        for request_id, (blocks, done, _) in (new or {}).items()
    ]
    now = {request_id: count for request_id, (_, _, count) in (new or {}).items()}
    cached = SimpleNamespace(
        req_ids=list(given.get("cached", {})),
        new_block_ids=[None for _ in given.get("cached", {})],
        num_computed_tokens=[done for done, _ in given.get("cached", {}).values()],
        resumed_req_ids=set(),
    )
    now |= {request_id: count for request_id, (_, count) in given.get("cached", {}).items()}
    return SimpleNamespace(
        scheduled_new_reqs=news,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=now,
        preempted_req_ids=given.get("preempted", set()),
    )
