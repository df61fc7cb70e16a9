"""ModelCard (the same for all instances of a model) and EngineInfo (one instance's own)."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvolt.core.ids import CardHash, InstanceId
from kvolt.core.kv_block import KvLayout
from kvolt.core.latency import LatencyModel, OccupancyModel, StepModel
from kvolt.core.request import Role

HASH_SCHEME = "xxh3-64/1337"
"""How SequenceHash is computed; a router refuses a worker that says anything else."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that a frontend must know of a served model. Content-addressed: see `card_hash`."""

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
    """Sampling defaults of the model, by the names of `Sampling`."""
    aliases: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    """Longest answer to a chat that names no limit; None for what the context has room for."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    max_num_seqs: int
    max_batch_tokens: int
    kv_total_blocks: int


class Link(msgspec.Struct, frozen=True):
    """A path from a peer's host as measured: by a self-test, then by all that goes over it."""

    path: str
    bytes_per_s: float
    latency_s: float


class KvSlabs(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance's blocks of KV lie: what must fit before another can take them."""

    block: KvLayout
    """Of one rank's blocks; the ranks are alike."""
    total_kv_heads: int
    """Of the model, which the ranks share."""
    tp_degree: int = 1


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one instance offers; published with its registration."""

    engine: str
    role: Role
    model: str
    card: CardHash
    block_size: int
    capacity: Capacity
    needs: tuple[Role, ...] = ()
    """Roles that must exist elsewhere before this instance can serve a request."""
    dp_ranks: tuple[int, ...] = (0,)
    hash_scheme: str = HASH_SCHEME
    kv_layout: str | None = None
    kv_slabs: KvSlabs | None = None
    """Of an instance that gives blocks to others or takes theirs; None where that is nobody's affair."""
    transfer_addresses: dict[str, str] = {}
    links: dict[str, Link] = {}
    latency: LatencyModel | None = None
    occupancy_latency: OccupancyModel | None = None
    """In the place of `latency`, for an engine whose steps have that shape. (A union of both would need a tag, which
    registrations of other versions do not have.)"""
    taints: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """Capability protocols the engine implements, by name."""
    extras: tuple[str, ...] = ()
    """What it takes of `Request.extra` that others would refuse: prompt_embeds, vllm_xargs."""
    kv_events: bool = True
    """Whether an engine that can tell of its blocks does; where it does not, routers go by their own decisions."""
    has_tiers: bool = False
    """Whether it keeps KV below its device, and may bring more of a prompt than it tells of."""
    shares_kv: bool = False
    """Whether it gives blocks of its tiers to others of its kind, and takes theirs where a request names them."""
    kv_pool: InstanceId | None = None
    """The pool that it reaches now, where that tells of its blocks. The instance registers anew when it changes."""
    loras: tuple[str, ...] = ()
    """Adapters that requests may choose here now. The instance registers anew when they change."""

    @property
    def tells_kv(self) -> bool:
        """Which blocks come and go."""
        return self.kv_events and "KvEvents" in self.features

    @property
    def step_model(self) -> StepModel | None:
        """How long its steps take, as far as it knows."""
        return self.latency if self.latency is not None else self.occupancy_latency


def card_hash(card: ModelCard) -> CardHash:
    """The card's content address: equal cards, equal hash, on any machine."""
    encoded = msgspec.msgpack.encode(card, order="deterministic")
    return CardHash(hashlib.blake2b(encoded, digest_size=16).hexdigest())
