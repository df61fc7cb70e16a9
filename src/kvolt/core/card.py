"""ModelCard, identical for all instances of a model, and EngineInfo, specific to one instance."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvolt.core.block_key import KvLayout
from kvolt.core.ids import CardHash, InstanceId
from kvolt.core.latency import LatencyModel, OccupancyModel, StepModel
from kvolt.core.request import Role

HASH_SCHEME = "xxh3-64/1337"
"""Algorithm and seed of SequenceHash; a router rejects workers with another scheme."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Model metadata for frontends. Content-addressed, see `card_hash`."""

    name: str
    tokenizer_json: bytes
    """A Hugging Face `tokenizer.json`."""
    chat_template: str = ""
    context_length: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    defaults: dict[str, Any] = {}
    """Generation defaults by the field names of `Sampling`, and `max_tokens`."""
    aliases: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    """Output limit of a chat request where neither it nor `defaults` has `max_tokens`; None: the rest of the
    context."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    max_num_seqs: int
    max_batch_tokens: int
    kv_total_blocks: int


class MeasuredLink(msgspec.Struct, frozen=True):
    """Transfer path from a peer's host: bandwidth and latency measured by a self-test, then by real transfers."""

    path: str
    bytes_per_s: float
    latency_s: float


class KvSlabs(msgspec.Struct, frozen=True, kw_only=True):
    """KV memory layout of an instance; determines which peers can exchange blocks with it."""

    block: KvLayout
    """Layout of one rank's blocks, equal on all ranks."""
    total_kv_heads: int
    """KV heads of the model, before they are split over ranks."""
    tp_degree: int = 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Per-instance metadata, published with the registration."""

    engine: str
    role: Role
    model: str
    root: str | None = None
    """Name under which the model was loaded, such as a path; None: `model`."""
    card: CardHash
    block_size: int
    capacity: Capacity
    dp_ranks: tuple[int, ...] = (0,)
    hash_scheme: str = HASH_SCHEME
    kv_layout: str | None = None
    kv_slabs: KvSlabs | None = None
    """Set if the instance exchanges KV blocks with peers."""
    transfer_addresses: dict[str, str] = {}
    links: dict[str, MeasuredLink] = {}
    latency: LatencyModel | None = None
    has_estimated_latency: bool = False
    """Whether `latency` is estimated from a few measured steps, which were too few for a fit."""
    occupancy_latency: OccupancyModel | None = None
    """Used instead of `latency` by engines with this cost shape. (A union of the two would need a tag that
    registrations of other versions lack.)"""
    taints: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """Names of the capability protocols that the engine implements."""
    extras: tuple[str, ...] = ()
    """Supported optional keys of `Request.extra`: prompt_embeds, vllm_xargs."""
    kv_events: bool = True
    """Whether KV events are enabled. Without them, routers estimate the cache from their own decisions."""
    has_tiers: bool = False
    """Whether the instance has KV tiers below the device, whose blocks may exceed those in its KV events."""
    shares_kv: bool = False
    """Whether the instance serves blocks of its tiers to peers and fetches `Request.kv_sources` from them."""
    kv_pool: InstanceId | None = None
    """Shared KV pool of the instance, if the pool publishes events. A change updates the registration."""
    loras: tuple[str, ...] = ()
    """Loaded LoRA adapters. A change updates the registration."""
    asleep: bool = False
    """Whether the engine sleeps. A change updates the registration."""

    @property
    def publishes_kv_events(self) -> bool:
        return self.kv_events and "KvEvents" in self.features

    @property
    def step_model(self) -> StepModel | None:
        """Step duration model, if one is known."""
        return self.latency if self.latency is not None else self.occupancy_latency


def card_hash(card: ModelCard) -> CardHash:
    """Content hash of a card; equal cards have equal hashes on every host."""
    encoded = msgspec.msgpack.encode(card, order="deterministic")
    return CardHash(hashlib.blake2b(encoded, digest_size=16).hexdigest())
