"""Sequence: one choice of one request in an engine.

Owns its tokens, its progress, its blocks and their names, and its stop rule (that of `contract`). Knows no
scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.delta import ChoiceEnd, check_stop
from kvolt.core.hashing import SequenceHasher, request_seed, token_bytes
from kvolt.core.request import Request
from kvolt.kv import BlockId, BlockName, BlockNames

HEAD_START = 64
"""Number of requests that a streaming sequence may overtake. More would let handoffs starve prompts, fewer
would let prompts delay answers."""

PROMOTED = -(1 << 40)
"""First element of the order of promoted sequences: before every priority."""


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    """Ended or aborted."""


class Naming(Protocol):
    """Names the full blocks of a growing sequence."""

    @property
    def names(self) -> BlockNames:
        """Names computed so far."""
        ...

    def reach(self, tokens: list[int], num_blocks: int) -> None: ...


class TokenNaming:
    """Names blocks by their tokens; each name is computed once."""

    __slots__ = ("_block_size", "_has_media", "_hasher", "_keys", "names")

    def __init__(self, request: Request, context: BlockKeyContext) -> None:
        """InvalidRequest if the request cannot be hashed."""
        self._block_size = context.block_size
        self._has_media = bool(request.media)
        self._keys = BlockKeyChain(context, request.media)
        self._hasher = SequenceHasher(
            context.block_size, request_seed(request.lora, request.salt), request.media
        )
        self.names = BlockNames()

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        """Compute the names of the first `num_blocks` blocks of `tokens`, which must be full. InvalidRequest
        for invalid token ids."""
        start = len(self.names)
        if num_blocks <= start:
            return
        new_tokens = tokens[start * self._block_size : num_blocks * self._block_size]
        if num_blocks == start + 1 and not self._has_media:  # the usual case for generated blocks
            block = token_bytes(new_tokens)
            self.names.append(BlockName(self._keys.append(block), self._hasher.append(block)))
            return
        keys = self._keys.extend(new_tokens)
        self.names.extend(BlockNames(keys, self._hasher.extend(new_tokens)))


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module. Blocks cover the tokens in order; KV is present for tokens before `num_computed`."""

    request: Request
    index: int
    """Index of the choice."""
    naming: Naming
    eos: frozenset[int] = frozenset()
    """Tokens that end it without a stop reason; empty with `ignore_eos`."""
    order: tuple[int, int, int] = (0, 0, 0)
    """Sort key, smaller first: negated priority, queue position, arrival. See `advance_order` and `promote`."""
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(init=False)
    """Prompt, prior output, and output generated here."""
    num_prompt: int = field(init=False)
    num_initial: int = field(init=False)
    """Tokens at its start: the prompt and prior output."""
    num_computed: int = 0
    """Tokens whose KV is in blocks."""
    num_to_prefill: int = 0
    """Tokens at its admission: it prefills until they are computed, then decodes."""
    blocks: list[BlockId] = field(default_factory=list)
    num_sealed: int = 0
    """Full blocks that were registered in the pool."""
    num_lent: int = 0
    """Leading blocks that peers read, which it keeps even under memory pressure."""
    received_span: tuple[int, int] = (0, 0)
    """Blocks [from, to) that were received while the blocks before them are computed; (0, 0) if none."""
    num_cached: int | None = None
    """Prompt tokens that were cached at its first admission or received during prefill; None before
    admission."""
    num_preemptions: int = 0
    """Number of preemptions."""
    ending_ids: frozenset[int] = field(init=False)
    """Tokens that may end it before its maximum length."""
    max_length: int = field(init=False)
    is_plain: bool = field(init=False)
    """Whether its tokens need no further information except for the first and last: one choice, no logprobs."""
    sampling_state: Any = None
    """State of the engine's sampler for this sequence."""

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = request.num_prompt_tokens
        self.tokens = [*request.token_ids] or [0] * self.num_prompt  # the latter if token ids are unknown
        self.tokens += request.prior_tokens_of(self.index) or self._handoff_tokens()
        self.num_initial = len(self.tokens)
        self.ending_ids = self.eos.union(request.stop.stop_token_ids)
        self.max_length = self.num_prompt + request.stop.max_tokens
        self.is_plain = request.sampling.num_choices == 1 and request.sampling.logprobs is None

    def _handoff_tokens(self) -> tuple[int, ...]:
        """The first token, if the prefill worker has emitted it."""
        handoff = self.request.handoff
        if handoff is None or handoff.first_tokens is None:
            return ()
        return handoff.first_tokens[self.index : self.index + 1]

    def advance_order(self) -> None:
        """Move ahead of prompts that arrived up to `HEAD_START` requests earlier, because its client is
        already streaming."""
        priority, position, arrival = self.order
        self.order = (priority, position - HEAD_START, arrival)

    def promote(self) -> None:
        """Move ahead of every priority, because requests of higher priorities have overtaken it."""
        self.order = (PROMOTED, *self.order[1:])

    @property
    def num_output(self) -> int:
        """Tokens generated, here and before; also the position of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def has_output(self) -> bool:
        """Whether it has generated a token here."""
        return len(self.tokens) > self.num_initial

    @property
    def banned_ids(self) -> frozenset[int]:
        """Tokens that must not be sampled now, because they would end it before `min_tokens`."""
        return self.ending_ids if self.num_output < self.request.stop.min_tokens else frozenset()

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every prompt token must be computed, even if cached."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and not self.index
            and not self.request.prior_tokens_of(self.index)
            and not self.has_output
        )

    def skip_received(self, block_size: int) -> None:
        """Skip the received blocks once all blocks before them are computed."""
        start, end = self.received_span
        num_passed = end * block_size - self.num_computed
        if self.num_computed < start * block_size or num_passed <= 0:
            return
        self.received_span = (0, 0)
        self.num_computed += num_passed
        if self.num_cached is not None and not self.has_output:
            self.num_cached = min(self.num_cached + num_passed, self.num_prompt)

    def append_token(self, token: int) -> ChoiceEnd | None:
        """Append a sampled token; returns the end it causes, if any."""
        self.tokens.append(token)
        if token not in self.ending_ids and len(self.tokens) < self.max_length:
            return None
        return self.check_end(token)

    def check_end(self, token: int) -> ChoiceEnd | None:
        """The end caused by the last token: one of `ending_ids`, or one that reaches the maximum length."""
        return check_stop(self.request.stop, self.eos, self.num_output, token)


@dataclass(slots=True, eq=False)
class ChoiceGroup:
    """The unfinished choices of one request."""

    live: list[Sequence]
    held_back: list[Sequence]
    """Choices that wait for the prompt of the first; they are in no queue."""
    keeps_blocks: bool
    first: Sequence
    """The choice that the others wait for, even after it has ended."""

    @property
    def has_started(self) -> bool:
        return self.first.num_cached is not None
