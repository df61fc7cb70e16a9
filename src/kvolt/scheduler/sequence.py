"""Sequence: one choice of one request in an engine.

Owns its tokens, how far they are computed, the blocks it holds and their names, and the rule by which it ends
(that of `contract`). Knows no scheduling: when it runs, waits or loses its blocks is up to who moves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.ending import End, ended_by
from kvolt.core.hashing import SequenceHasher, request_seed, token_bytes
from kvolt.core.request import Request
from kvolt.kv import BlockId, BlockName, Names

HEAD_START = 64
"""Requests. More would let a stream of handoffs starve prompts, fewer would let prompts delay answers."""


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    """Ended or aborted."""


class Naming(Protocol):
    """How the full blocks of a growing sequence get their names."""

    @property
    def names(self) -> Names:
        """As many as were reached so far."""
        ...

    def reach(self, tokens: list[int], num_blocks: int) -> None: ...


class TokenNaming:
    """By the tokens, each name worked out once."""

    __slots__ = ("_block_size", "_has_media", "_hasher", "_keys", "names")

    def __init__(self, request: Request, context: BlockKeyContext) -> None:
        """InvalidRequest where the request cannot be hashed."""
        self._block_size = context.block_size
        self._has_media = bool(request.media)
        self._keys = BlockKeyChain(context, request.media)
        self._hasher = SequenceHasher(
            context.block_size, request_seed(request.lora, request.salt), request.media
        )
        self.names = Names()

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        """Name the first `num_blocks` blocks of `tokens`, which must be full. InvalidRequest for no token ids."""
        start = len(self.names)
        if num_blocks <= start:
            return
        fresh = tokens[start * self._block_size : num_blocks * self._block_size]
        if num_blocks == start + 1 and not self._has_media:  # as every block of an answer comes
            block = token_bytes(fresh)
            self.names.append(BlockName(self._keys.append(block), self._hasher.append(block)))
            return
        keys = self._keys.extend(fresh)
        self.names.extend(Names(keys, self._hasher.extend(fresh)))


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module. Blocks cover its tokens in order; those before `num_computed` have their KV there."""

    request: Request
    index: int
    """Which of the request's choices."""
    naming: Naming
    eos: frozenset[int] = frozenset()
    """Tokens that end it without a reason told: none with `ignore_eos`."""
    order: tuple[int, int, int] = (0, 0, 0)
    """Smaller goes first: priority, place in the queue, arrival. See `go_ahead`."""
    phase: Phase = Phase.WAITING
    tokens: list[int] = field(init=False)
    """Prompt, what was generated before it came here, and what was generated since."""
    num_prompt: int = field(init=False)
    num_given: int = field(init=False)
    """Tokens that it came with: the prompt, and what was generated elsewhere."""
    num_computed: int = 0
    """Tokens whose KV lies in blocks."""
    num_to_prefill: int = 0
    """Tokens that it had when it was admitted: until these are computed it prefills, then it decodes."""
    blocks: list[BlockId] = field(default_factory=list)
    num_sealed: int = 0
    """Blocks of it that are full and were given to the pool as such."""
    num_lent: int = 0
    """Blocks of it that others read: those it keeps, whoever is in need of some."""
    ahead: tuple[int, int] = (0, 0)
    """Blocks of it [from, to) that hold what they should while those before them are computed: they came from
    elsewhere. (0, 0) where there are none."""
    num_cached: int | None = None
    """Tokens of the prompt that were found in the cache at its first admission, or came while the rest was computed;
    None before that."""
    num_preemptions: int = 0
    """How often it lost its blocks to others."""
    enders: frozenset[int] = field(init=False)
    """Tokens after which it may be over; after any other it is not, but for its length."""
    max_length: int = field(init=False)
    is_plain: bool = field(init=False)
    """Whether a token is all that there is to tell, but for its first and last: no other choice, no logprobs."""
    voice: Any = None
    """For who samples its tokens: whatever it keeps between them."""

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = request.num_prompt_tokens
        self.tokens = [*request.token_ids] or [0] * self.num_prompt  # the latter where nobody knows them
        self.tokens += request.resumed(self.index) or self._handed_over()
        self.num_given = len(self.tokens)
        self.enders = self.eos.union(request.stop.stop_token_ids)
        self.max_length = self.num_prompt + request.stop.max_tokens
        self.is_plain = request.sampling.num_choices == 1 and request.sampling.logprobs is None

    def _handed_over(self) -> tuple[int, ...]:
        """The first token, where prefill sampled and told it elsewhere."""
        handoff = self.request.handoff
        if handoff is None or handoff.first_tokens is None:
            return ()
        return handoff.first_tokens[self.index : self.index + 1]

    def go_ahead(self) -> None:
        """Its client has tokens: it goes before prompts that came up to `HEAD_START` requests earlier."""
        priority, place, arrived = self.order
        self.order = (priority, place - HEAD_START, arrived)

    @property
    def num_output(self) -> int:
        """Tokens generated, here and before: also the position of the next one."""
        return len(self.tokens) - self.num_prompt

    @property
    def has_spoken(self) -> bool:
        """Whether it has generated a token here."""
        return len(self.tokens) > self.num_given

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come now: those that would end it before `min_tokens`."""
        return self.enders if self.num_output < self.request.stop.min_tokens else frozenset()

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether every token of the prompt has to be computed, cached or not."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and not self.index
            and not self.request.resumed(self.index)
            and not self.has_spoken
        )

    def pass_over(self, block_size: int) -> None:
        """Go on behind the blocks that are ahead, once all before them are computed."""
        start, end = self.ahead
        num_passed = end * block_size - self.num_computed
        if self.num_computed < start * block_size or num_passed <= 0:
            return
        self.ahead = (0, 0)
        self.num_computed += num_passed
        if self.num_cached is not None and not self.has_spoken:
            self.num_cached = min(self.num_cached + num_passed, self.num_prompt)

    def push(self, token: int) -> End | None:
        """Append a sampled token; how it ends the sequence, if it does."""
        self.tokens.append(token)
        if token not in self.enders and len(self.tokens) < self.max_length:
            return None
        return self.end_by(token)

    def end_by(self, token: int) -> End | None:
        """How the token appended last ends it: one of `enders`, or one that makes it as long as it may be."""
        return ended_by(self.request.stop, self.eos, self.num_output, token)
