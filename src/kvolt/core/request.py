"""Request: token ids and parameters sent from the frontend to a worker. It carries no text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvolt.core.hashing import MediaExtent
from kvolt.core.ids import InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Tier


class Role(StrEnum):
    """Part of a request that a worker computes."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters. Randomness is a function of (seed, position)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    num_choices: int = 1
    logprobs: int | None = None
    """Number of alternatives reported per token; None: no log probabilities."""
    prompt_logprobs: int | None = None


class StopConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token-level stop conditions of a choice. The frontend matches stop strings itself."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


class Grammar(msgspec.Struct, frozen=True):
    """Constraint on the output, validated by the frontend."""

    kind: GrammarKind
    text: str


class MediaSpan(MediaExtent, frozen=True, omit_defaults=True):
    """Placeholder tokens of one image, video or audio."""

    kind: str = "image"


class LinkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per token of KV transferred between a candidate worker and the other end of a handoff."""

    token_s: Annotated[float, msgspec.Meta(ge=0)]
    """Default for workers that are not in `by_peer`."""
    by_peer: dict[InstanceId, Annotated[float, msgspec.Meta(ge=0)]] = {}


MIN_SHARE, MAX_SHARE = 0.1, 100.0
"""Bounds of a tenant's share of the router's queue."""


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Routing preferences and constraints of a request."""

    tenant: str | None = None
    tenant_share: Annotated[float, msgspec.Meta(ge=MIN_SHARE, le=MAX_SHARE)] = 1.0
    """Share of the router's queue, relative to other tenants."""
    session: str | None = None
    priority: int = 0
    pins: dict[Role, InstanceId] = {}
    pinned_dp_rank: int | None = None
    """DP rank required by the caller; after routing, the selected rank."""
    allowed: tuple[InstanceId, ...] = ()
    """Workers that may serve the request (decode or aggregated); empty: all."""
    allowed_prefill: tuple[InstanceId, ...] = ()
    """Prefill workers that may compute the prompt; empty: all."""
    required_taints: tuple[str, ...] = ()
    """A worker must have all of these."""
    preferred_taints: dict[str, float] = {}
    expected_output_tokens: int | None = None
    weights: dict[str, float] = {}
    """Policy weights by name; they override the router's."""
    temperature: float | None = None
    """Worker selection temperature; overrides the router's."""
    query_only: bool = False
    """Return the routing decision only: dispatch nothing and reserve nothing."""
    link_costs: LinkCosts | None = None
    """Cost of transferring the prompt's KV when the other worker is known. Set by the journey for its router."""


class KvSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """First `num_blocks` blocks of the prompt, as held by another instance."""

    instance: InstanceId
    tier: Tier
    num_blocks: int
    dp_rank: int = 0


RENDEZVOUS_ADDRESS_KEY = "kvolt"
"""Key of the rendezvous address in `EngineInfo.transfer_addresses`."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the prefill and decode workers of a decode-first request exchange KV."""

    mailbox: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """First mailbox id, random and secret; the parts of the prompt use consecutive ids."""
    address: str
    """Address of the prefill worker."""
    reader: str = ""
    """`Instance.identity` of the decode worker, which alone may read the KV."""


READER_KEY_BYTES = 16


def reader_proof(key: bytes, reader: str) -> bytes:
    """Proof that offers with this reader key were made for the process with the identity `reader`."""
    return hashlib.blake2b(reader.encode(), key=key, digest_size=16).digest()


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Transfer of a request from prefill to decode. Only the two engines interpret the ticket."""

    ticket: bytes
    prefill_instance: InstanceId
    block_hashes: tuple[SequenceHash, ...] = ()
    expires_in_s: float | None = None
    token_ids: tuple[int, ...] = ()
    """Prompt as expanded by prefill; spares decode the preprocessing."""
    media: tuple[MediaSpan, ...] = ()
    first_tokens: tuple[int, ...] | None = None
    """Tokens that prefill sampled and emits; decode does not emit them again."""
    cached_tokens: int | None = None
    """Prompt tokens that prefill found in its cache."""
    reader_key: bytes = b""
    """From the prefill worker to the frontend; no decode worker gets it."""
    reader_proof: bytes = b""
    """From the frontend to one decode worker."""

    def for_reader(self, identity: str) -> Handoff:
        """The handoff for one decode worker, which no process with another identity can use."""
        if not self.reader_key:
            return self
        proof = reader_proof(self.reader_key, identity)
        return msgspec.structs.replace(self, reader_key=b"", reader_proof=proof)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to an engine, serialized between processes."""

    request_id: RequestId
    model: str
    token_ids: tuple[int, ...]
    stop: StopConditions
    sampling: Sampling = Sampling()
    block_size: int | None = None
    """Block size of `sequence_hashes`."""
    sequence_hashes: tuple[SequenceHash, ...] = ()
    grammar: Grammar | None = None
    salt: str | None = None
    lora: str | None = None
    media: tuple[MediaSpan, ...] = ()
    routing: RoutingHints = RoutingHints()
    kv_sources: tuple[KvSource, ...] = ()
    rendezvous: Rendezvous | None = None
    handoff: Handoff | None = None
    prefill_only: bool = False
    """Compute the prompt only; a decode worker generates the output."""
    prior_tokens: tuple[int, ...] = ()
    """Output tokens generated before the request migrated; generation continues after them."""
    prior_tokens_by_choice: tuple[tuple[int, ...] | None, ...] = ()
    """`prior_tokens` per choice, when there are several; None: the choice is complete and is not computed."""
    deadline_s: float | None = None
    """Time left when the request was sent: relative, since clocks of hosts differ."""
    extra: dict[str, Any] = {}
    """Engine-specific arguments, passed through unchanged."""
    trace_prompt_length: int = 0
    """Prompt length of a trace request, which has no token ids; 0 for every other request."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) or self.trace_prompt_length

    @property
    def has_prior_tokens(self) -> bool:
        """Whether tokens were generated before the request migrated."""
        return bool(self.prior_tokens or self.prior_tokens_by_choice)

    @property
    def has_started(self) -> bool:
        """Whether output exists: prior tokens, or first tokens sampled by a prefill worker."""
        return self.has_prior_tokens or (self.handoff is not None and self.handoff.first_tokens is not None)

    @property
    def open_choices(self) -> Sequence[int]:
        """Indices of the choices to compute."""
        if not self.prior_tokens_by_choice:
            return range(self.sampling.num_choices)
        return [index for index, tokens in enumerate(self.prior_tokens_by_choice) if tokens is not None]

    def prior_tokens_of(self, index: int) -> tuple[int, ...]:
        """Prior tokens of one choice."""
        return (
            (self.prior_tokens_by_choice[index] or ()) if self.prior_tokens_by_choice else self.prior_tokens
        )

    @property
    def num_prior_tokens(self) -> int:
        """Prior tokens of all choices to compute."""
        if not self.prior_tokens_by_choice:
            return len(self.prior_tokens) * self.sampling.num_choices
        return sum(len(tokens or ()) for tokens in self.prior_tokens_by_choice)

    @property
    def num_context_tokens(self) -> int:
        """Prompt and prior tokens: the context of the next token."""
        return self.num_prompt_tokens + self.num_prior_tokens
