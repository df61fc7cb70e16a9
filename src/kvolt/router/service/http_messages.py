"""JSON bodies of the router's HTTP API. Unknown fields are refused.

Hashes are SequenceHashes (`core.hashing`): a list of integers, or base64 of eight little-endian bytes each, for clients
whose JSON has no 64-bit integers.
"""

from __future__ import annotations

import binascii
import re
import struct
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvolt.core.card import HASH_SCHEME, EngineInfo
from kvolt.core.errors import MALFORMED, InvalidRequest
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.kv_events import (
    HASH_BYTES,
    Cleared,
    KvChange,
    Removed,
    Stored,
    Tier,
    pack_hashes,
    unpack_hashes,
)
from kvolt.core.latency import LatencyModel
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.breaker import Outcome
from kvolt.router.choice import WorkerChoice
from kvolt.router.service.builders import UNKNOWN, hashes_of, request_of, worker_info
from kvolt.router.service.standalone_state import StandaloneEvent

DEFAULT_MODEL = "default"

_MAX_TTL_S = 7 * 24 * 3600

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Hashes = str | list[int]
_Rank = Annotated[int, Meta(ge=0, le=65_535)]
_Ttl = Annotated[float, Meta(gt=0, le=_MAX_TTL_S)]
_Tokens = Annotated[int, Meta(ge=0, le=UNKNOWN)]


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker; unspecified limits do not limit."""

    worker: Name
    block_size: Annotated[int, Meta(ge=1, le=1_048_576)]
    model: Name = DEFAULT_MODEL
    dp_ranks: Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=1024)] = (0,)
    max_num_seqs: Annotated[int, Meta(ge=1, le=UNKNOWN)] = UNKNOWN
    max_batch_tokens: Annotated[int, Meta(ge=1, le=UNKNOWN)] = UNKNOWN
    kv_total_blocks: Annotated[int, Meta(ge=0, le=2**53)] = 0
    hash_scheme: str = HASH_SCHEME
    kv_events: bool = True
    """Whether its events will be posted; if not, its blocks are estimated from decisions."""
    latency: LatencyModel | None = None
    taints: list[str] = []
    loras: list[str] = []

    def engine_info(self) -> EngineInfo:
        fields = msgspec.structs.asdict(self)
        del fields["worker"]
        return worker_info(**fields)


# --- KV events


class StoredBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stored"):
    hashes: Hashes | None = None
    token_ids: list[int] | None = None
    """Instead of hashes: tokens of a sequence from its start; whole blocks count."""
    lora: str | None = None
    salt: str | None = None
    tier: Tier = Tier.DEVICE


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="removed"):
    hashes: Hashes
    tier: Tier = Tier.DEVICE


class ClearedBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cleared"):
    tier: Tier | None = None


class EventBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    change: StoredBlocks | RemovedBlocks | ClearedBlocks
    dp_rank: _Rank = 0
    event_id: Annotated[int, Meta(ge=0)] | None = None
    """Numbered events must be consecutive; others are applied in order of arrival."""
    epoch: Annotated[int, Meta(ge=0)] = 0

    def event(self, block_size: int) -> StandaloneEvent:
        return StandaloneEvent(self._change(block_size), self.dp_rank, self.event_id, self.epoch)

    def _change(self, block_size: int) -> KvChange:
        match self.change:
            case StoredBlocks() as stored:
                return Stored(_stored_hashes(stored, block_size), tier=stored.tier)
            case RemovedBlocks() as removed:
                return Removed(packed_of(removed.hashes, "hashes"), removed.tier)
            case ClearedBlocks() as cleared:
                return Cleared(cleared.tier)


def _stored_hashes(stored: StoredBlocks, block_size: int) -> bytes:
    if (stored.hashes is None) == (stored.token_ids is None):
        raise InvalidRequest("stored blocks have either hashes or token_ids", param="hashes")
    if stored.hashes is not None:
        return packed_of(stored.hashes, "hashes")
    assert stored.token_ids is not None
    return pack_hashes(hashes_of(stored.token_ids, block_size, stored.lora, stored.salt))


class EventsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    events: list[EventBody]


class HeldBlocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hashes: Hashes
    dp_rank: _Rank = 0
    tier: Tier = Tier.DEVICE


class BlocksBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Snapshot of a worker. Numbered events continue at `next_id`."""

    blocks: list[HeldBlocks]
    epoch: Annotated[int, Meta(ge=0)] | None = None
    next_id: Annotated[int, Meta(ge=0)] = 0

    def by_rank_and_tier(self) -> dict[tuple[int, Tier], bytes]:
        packed: dict[tuple[int, Tier], bytes] = {}
        for each in self.blocks:
            key = (each.dp_rank, each.tier)
            packed[key] = packed.get(key, b"") + packed_of(each.hashes, "blocks")
        return packed


class LoadBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    running: _Tokens = 0
    waiting: _Tokens = 0
    kv_used_blocks: _Tokens = 0
    kv_total_blocks: _Tokens = 0
    dp_rank: _Rank = 0

    def load(self) -> WorkerLoad:
        return WorkerLoad(self.running, self.waiting, self.kv_used_blocks, self.kv_total_blocks, self.dp_rank)


# --- decisions


class PlacementQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to be routed: its tokens, or their hashes and number."""

    model: Name = DEFAULT_MODEL
    token_ids: list[int] | None = None
    hashes: Hashes | None = None
    num_tokens: _Tokens | None = None
    lora: str | None = None
    salt: str | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=UNKNOWN)] = UNKNOWN
    """Limit of the answer."""
    expected_output_tokens: _Tokens | None = None
    excluded: list[str] = []
    allowed: list[str] = []
    worker: str | None = None
    """Route to this worker only."""
    dp_rank: _Rank | None = None
    tenant: str | None = None
    session: str | None = None
    required_taints: list[str] = []
    preferred_taints: dict[str, float] = {}
    weights: dict[str, float] = {}
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    request_id: str = ""
    ttl_s: _Ttl | None = None
    """TTL of the reservation; without one it lasts until its release."""
    refuse_saturated: bool = False
    """Respond 429 if all workers are saturated."""

    def request(self, block_size: int) -> Request:
        hashes, num_tokens = self._content(block_size)
        pins = {} if self.worker is None else {Role.AGGREGATED: InstanceId(self.worker)}
        routing = RoutingHints(
            tenant=self.tenant,
            session=self.session,
            pins=pins,
            pinned_dp_rank=self.dp_rank,
            allowed=tuple(map(InstanceId, self.allowed)),
            required_taints=tuple(self.required_taints),
            preferred_taints=self.preferred_taints,
            expected_output_tokens=self.expected_output_tokens,
            weights=self.weights,
            temperature=self.temperature,
        )
        return request_of(
            hashes,
            num_tokens,
            block_size,
            max_tokens=self.max_tokens,
            lora=self.lora,
            routing=routing,
            request_id=self.request_id,
            model=self.model,
        )

    def _content(self, block_size: int) -> tuple[tuple[SequenceHash, ...], int]:
        if (self.hashes is None) == (self.token_ids is None):
            raise InvalidRequest("give either token_ids or hashes", param="token_ids")
        if self.token_ids is not None:
            if not self.token_ids:
                raise InvalidRequest("a prompt has at least one token", param="token_ids")
            return hashes_of(self.token_ids, block_size, self.lora, self.salt), len(self.token_ids)
        assert self.hashes is not None
        hashes = unpack_hashes(packed_of(self.hashes, "hashes"))
        num_tokens = len(hashes) * block_size if self.num_tokens is None else self.num_tokens
        if not len(hashes) * block_size <= num_tokens or not num_tokens:
            raise InvalidRequest(
                f"{num_tokens} tokens do not have {len(hashes)} blocks of {block_size} tokens",
                param="num_tokens",
            )
        return hashes, num_tokens


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Chosen worker of a request."""

    worker: InstanceId
    dp_rank: int
    overlap_blocks: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    predicted_ttft_ms: float
    is_saturated: bool
    reservation: str | None = None
    ttl_s: float | None = None


def placement_of(
    choice: WorkerChoice, reservation: str | None = None, ttl_s: float | None = None
) -> Placement:
    return Placement(
        worker=choice.worker_rank.instance_id,
        dp_rank=choice.worker_rank.dp_rank,
        overlap_blocks=choice.overlap_blocks,
        cached_tokens=choice.overlap_blocks * (choice.request.block_size or 1),
        queue_ms=choice.queue_s * 1e3,
        prefill_ms=choice.prefill_s * 1e3,
        predicted_ttft_ms=choice.predicted_s * 1e3,
        is_saturated=choice.is_saturated,
        reservation=reservation,
        ttl_s=ttl_s,
    )


class FirstTokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cached_tokens: _Tokens | None = None


class RenewalBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttl_s: _Ttl | None = None


class ReleaseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End of a request, with token counts if it was answered completely."""

    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens | None = None
    cached_tokens: _Tokens = 0
    outcome: Outcome | None = None
    """Outcome for the worker's circuit breaker. Default: `answered` with token counts, else `unknown`."""

    @property
    def worker_outcome(self) -> Outcome:
        if self.outcome is not None:
            return self.outcome
        return Outcome.UNKNOWN if self.completion_tokens is None else Outcome.ANSWERED


# --- decoding


def packed_of(hashes: Hashes, param: str) -> bytes:
    try:
        if isinstance(hashes, str):
            data = binascii.a2b_base64(hashes, strict_mode=True)
            if len(data) % HASH_BYTES:
                raise InvalidRequest(f"{param}: {len(data)} bytes are not a multiple of 8", param=param)
            return data
        return pack_hashes(hashes)
    except (binascii.Error, struct.error, UnicodeEncodeError, ValueError):
        raise InvalidRequest(
            f"{param} must be unsigned 64-bit integers, or their bytes in base64", param=param
        ) from None


T = TypeVar("T")

_PATH = re.compile(r"`\$((?:\.\w+|\[[^\]]*\])+)`|field `(\w+)`")


def read(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except MALFORMED as error:
        path = _PATH.search(str(error))
        param = None if path is None else (path[1] or path[2]).lstrip(".")
        raise InvalidRequest(f"cannot decode the body: {error}", param=param) from None


def read_number(text: str | None, name: str) -> int | None:
    """Decode a query parameter; None if it is absent."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise InvalidRequest(f"{name} must be a whole number", param=name)
    return int(text)
