"""Request: all that a worker needs to compute an answer. Tokens, never text."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from kvolt.core.hashing import MediaExtent
from kvolt.core.ids import InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Tier


class Role(StrEnum):
    """What part of the work a worker does."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Randomness is a function of (seed, position)."""

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
    """How many alternatives to report per token; None for none at all."""
    prompt_logprobs: int | None = None


class StopConditions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a choice ends. Stop strings are the edge's business: engines see tokens only."""

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
    """A constraint on the output, already validated at the edge."""

    kind: GrammarKind
    text: str


class MediaSpan(MediaExtent, frozen=True, omit_defaults=True):
    """Placeholder tokens that stand for one image, video or audio, and where its content is."""

    kind: str = "image"
    uri: str | None = None


class LinkCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the KV of one token takes between each candidate and the other end of a handoff."""

    token_s: Annotated[float, msgspec.Meta(ge=0)]
    """Where nothing else is known."""
    by_peer: dict[InstanceId, Annotated[float, msgspec.Meta(ge=0)]] = {}


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the caller lets a router know or demands of it."""

    tenant: str | None = None
    session: str | None = None
    priority: int = 0
    pins: dict[Role, InstanceId] = {}
    pinned_dp_rank: int | None = None
    """Of the caller before it is routed; of the decision when a worker has it."""
    allowed: tuple[InstanceId, ...] = ()
    """Of those who answer no others; empty for anyone."""
    allowed_prefill: tuple[InstanceId, ...] = ()
    """The same of those who compute prompts for others."""
    required_taints: tuple[str, ...] = ()
    """Only workers that have them all."""
    preferred_taints: dict[str, float] = {}
    expected_output_tokens: int | None = None
    weights: dict[str, float] = {}
    """Of the policy, by name, in place of the router's own."""
    temperature: float | None = None
    """Of the choice between workers, in place of the router's own."""
    query_only: bool = False
    """Where would it go? It is not sent, and nothing is booked."""
    links: LinkCosts | None = None
    """Of the journey, for a router alone: what moving the prompt's KV takes, where the other worker is known."""


class KvSource(msgspec.Struct, frozen=True, omit_defaults=True):
    """Blocks that another place holds: the first `num_blocks` of the prompt."""

    instance: InstanceId
    tier: Tier
    num_blocks: int
    dp_rank: int = 0


MEETING = "kvolt"
"""The name of the address in `EngineInfo.transfer_addresses` where workers meet."""


class Rendezvous(msgspec.Struct, frozen=True):
    """Where decode meets prefill in the decode-first flow, where both have a request at the same time."""

    room: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    """A number that nobody else knows; the parts of the prompt have this one and those after it."""
    address: str
    """Of the prefill worker."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's move from prefill to decode. The ticket is opaque to all but the two engines."""

    ticket: bytes
    prefill_instance: InstanceId
    block_hashes: tuple[SequenceHash, ...] = ()
    expires_in_s: float | None = None
    token_ids: tuple[int, ...] = ()
    """The prompt as expanded by prefill, so that decode repeats no preprocessing."""
    media: tuple[MediaSpan, ...] = ()
    first_tokens: tuple[int, ...] | None = None
    """Present when prefill sampled them; then prefill's side emits them and decode does not."""
    cached_tokens: int | None = None
    """Of the prompt, those that prefill did not have to compute."""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as it crosses processes."""

    request_id: RequestId
    model: str
    token_ids: tuple[int, ...]
    stop: StopConditions
    sampling: Sampling = Sampling()
    block_size: int | None = None
    """Block size that the hashes were computed with."""
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
    """Its prompt is to be computed for somebody else to go on with."""
    resume: tuple[int, ...] = ()
    """Output tokens that the client already has: go on after them."""
    resume_choices: tuple[tuple[int, ...] | None, ...] = ()
    """The same for each of several choices, in place of `resume`; None for one that is over and not wanted again."""
    deadline_s: float | None = None
    """Time left when it was sent. Remaining time, not a date: clocks of machines differ."""
    extra: dict[str, Any] = {}
    """Engine-specific arguments, passed through."""
    paper_length: int = 0
    """How long a prompt is whose tokens nobody knows, as one of a trace: then `token_ids` is empty."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) or self.paper_length

    @property
    def is_resumed(self) -> bool:
        """Whether the client has something of the answer already."""
        return bool(self.resume or self.resume_choices)

    @property
    def has_begun(self) -> bool:
        """Whether its client reads the answer already: it resumes, or a prefill worker has sampled its first tokens."""
        return self.is_resumed or (self.handoff is not None and self.handoff.first_tokens is not None)

    @property
    def open_choices(self) -> Sequence[int]:
        """Indices of the choices that are to be computed."""
        if not self.resume_choices:
            return range(self.sampling.num_choices)
        return [index for index, resumed in enumerate(self.resume_choices) if resumed is not None]

    def resumed(self, index: int) -> tuple[int, ...]:
        """Output tokens of a choice that the client already has."""
        return (self.resume_choices[index] or ()) if self.resume_choices else self.resume

    @property
    def num_resumed_tokens(self) -> int:
        """Of all choices that are to be computed."""
        if not self.resume_choices:
            return len(self.resume) * self.sampling.num_choices
        return sum(len(resumed or ()) for resumed in self.resume_choices)

    @property
    def num_given_tokens(self) -> int:
        """All that has to be there before its next tokens can be computed: the prompt, and what it resumes after."""
        return self.num_prompt_tokens + self.num_resumed_tokens
