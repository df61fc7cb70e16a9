"""Builders of requests and worker metadata for callers without kvolt workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.core.card import HASH_SCHEME, Capacity, EngineInfo
from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import local_hashes, request_seed, sequence_hashes
from kvolt.core.ids import CardHash, RequestId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, RoutingHints, StopConditions

UNKNOWN = 2**31 - 1
"""Default of limits that are not specified."""

_NO_HINTS = RoutingHints()


def hashes_of(
    token_ids: Sequence[int], block_size: int, lora: str | None = None, salt: str | None = None
) -> tuple[SequenceHash, ...]:
    """Hashes of the whole blocks of a sequence. Raises InvalidRequest for invalid tokens."""
    seed = request_seed(lora, salt)
    try:
        return tuple(sequence_hashes(local_hashes(token_ids, block_size, seed)))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="token_ids") from None


def request_of(
    hashes: Sequence[SequenceHash],
    num_tokens: int,
    block_size: int,
    *,
    max_tokens: int = UNKNOWN,
    lora: str | None = None,
    routing: RoutingHints = _NO_HINTS,
    request_id: str = "",
    model: str = "",
) -> Request:
    """A request as routers need it; `max_tokens` limits its answer."""
    return Request(
        request_id=RequestId(request_id),
        model=model,
        token_ids=(),
        stop=StopConditions(max_tokens=max_tokens),
        block_size=block_size,
        sequence_hashes=tuple(hashes),
        lora=lora,
        routing=routing,
        trace_prompt_length=num_tokens,
    )


def prompt_of(
    token_ids: Sequence[int],
    block_size: int,
    *,
    max_tokens: int = UNKNOWN,
    lora: str | None = None,
    salt: str | None = None,
    routing: RoutingHints = _NO_HINTS,
) -> Request:
    """The same, from token ids."""
    hashes = hashes_of(token_ids, block_size, lora, salt)
    return request_of(hashes, len(token_ids), block_size, max_tokens=max_tokens, lora=lora, routing=routing)


def worker_info(
    block_size: int,
    *,
    dp_ranks: Sequence[int] = (0,),
    max_num_seqs: int = UNKNOWN,
    max_batch_tokens: int = UNKNOWN,
    kv_total_blocks: int = 0,
    kv_events: bool = True,
    latency: LatencyModel | None = None,
    taints: Sequence[str] = (),
    loras: Sequence[str] = (),
    hash_scheme: str = HASH_SCHEME,
    model: str = "",
) -> EngineInfo:
    """Metadata of a worker; unspecified limits do not limit. `kv_events`: whether its events will be posted."""
    return EngineInfo(
        engine="external",
        role=Role.AGGREGATED,
        model=model,
        card=CardHash(""),
        block_size=block_size,
        capacity=Capacity(
            max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, kv_total_blocks=kv_total_blocks
        ),
        dp_ranks=tuple(dict.fromkeys(dp_ranks)),
        hash_scheme=hash_scheme,
        latency=latency,
        taints=tuple(taints),
        features=("KvEvents",),
        kv_events=kv_events,
        loras=tuple(loras),
    )
