"""StepPlanner: chooses which sequences run, and the tokens and blocks of the next step.

Owns the running and waiting lists and the blocks of running sequences. Knows no requests and no results of
steps: those belong to `scheduler`. Rules:

- Decodes always run, one token each. The rest of `max_batch_tokens` goes to prefills in chunks, then to new
  sequences. A sequence computes all its tokens except the one sampled last, so a decode is the last chunk of
  a prefill. With `Scheduling.SGLANG` prefills and new sequences get the whole step, and decodes run in steps
  without them; their delay is bounded by `max_num_seqs` and the blocks.
- If step times are known (`pace`), a chunk ends at the last block boundary at which the predicted step time
  is within `StepPace.limit_s`. The first prompt of a step always gets one block, so every prompt finishes.
- If the first prompt is cut by that limit, later ones that can be completed in at most half of the step's
  time go first, so that short prompts, and last tokens of prompts with received KV, do not wait for a long
  one. The first prompt gets the other half. A later prompt never gets blocks that the first waiting one
  needs.
- Both lists are sorted by priority, then arrival. A sequence whose client is streaming already (it sampled
  here, or came by handoff or migration) precedes prompts that arrived up to `HEAD_START` requests earlier, no
  more, so that handoffs do not starve prompts. Only the first waiting sequence can be admitted: large
  requests do not starve.
- Priorities age. While sequences of lower priorities wait, every `PROMOTED_ONE_IN`th admission is the oldest of
  them. It then precedes every priority, so it is not preempted for a later one either.
- A sequence is admitted if all its tokens have room and one block is left for each running sequence;
  otherwise it might be preempted at the next block boundary. It starts after its longest cached prefix, but
  its last token is always computed, because the next token is sampled from it.
- If a decode finds no block, the last running sequence is preempted: it releases its blocks, waits at its old
  position, and later prefills all its tokens again behind what is still cached. The first sequence is never
  preempted, and any one fits the pool alone (checked on arrival), so all of them finish, unless blocks are
  held for transfers (see `holds`): then nothing can be planned until these are released.
- Prefetched blocks of waiting requests (see `prefetched_blocks`) are evicted only before a preemption, or if
  the first waiting sequence would not be admitted otherwise; those of the last in the queue first.
- A sequence that lends blocks (a prompt computed for a remote decode, which generates one token) is not
  preempted, because peers read them. All its blocks were allocated at admission, so it ends even if all others are
  preempted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from operator import attrgetter

from kvolt.core.ids import BlockKey
from kvolt.core.latency import StepModel
from kvolt.core.load import StepStats
from kvolt.kv import BlockId, BlockPool
from kvolt.scheduler.prefetched_blocks import PrefetchedBlocks
from kvolt.scheduler.sequence import PROMOTED, Phase, Sequence
from kvolt.scheduler.shared_reads import SharedReads
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import Limits, Scheduling, StepPlan, Work, shared_prefill_tokens, with_chunk

_order = attrgetter("order")
PROMOTED_ONE_IN = 8
"""As in the router's queue: a backlog of low priority takes at most this share of the admissions."""
_MAX_OVERTAKING = 16
"""Number of waiting sequences considered to go before the first one; bounds the cost per step."""


class StepPlanner:
    """See the module."""

    def __init__(
        self, pool: BlockPool, prefetched: PrefetchedBlocks, limits: Limits, scheduling: Scheduling
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._num_before_lower = 0
        """Admissions while lower priorities waited, since the last promotion."""
        self.pace: StepPace | None = None
        """Predicted step times; None if unknown: then only the token count limits a step."""
        self._pool = pool
        self._prefetched = prefetched
        self.limits = limits
        self.shared = SharedReads(limits.block_size)
        self._prompts_first = scheduling is Scheduling.SGLANG

    def plan(self) -> StepPlan:
        """The next step, with its blocks allocated; empty if nothing can run."""
        return self._plan_apart() if self._prompts_first else self._plan_mixed()

    def enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def advance_order(self, sequence: Sequence) -> None:
        """Move a running sequence that sampled its first token before those that have not."""
        del self.running[bisect_left(self.running, sequence.order, key=_order)]
        sequence.advance_order()
        insort(self.running, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence; its blocks pass to the caller."""
        self.shared.remove(sequence)
        queue = self.running if sequence.phase is Phase.RUNNING else self.waiting
        del queue[bisect_left(queue, sequence.order, key=_order)]

    def grow(self, sequence: Sequence, num_more: int = 1) -> bool:
        """Allocate more blocks, preempting others if necessary; False if the sequence itself was preempted.
        Not for a sequence that lends blocks."""
        while (blocks := self.allocate(num_more)) is None:
            victim = next(one for one in reversed(self.running) if not one.num_lent)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += blocks
        return True

    def allocate(self, count: int) -> list[BlockId] | None:
        """Allocate all or nothing, evicting prefetched blocks if necessary."""
        num_lacking = count - self._pool.num_free
        if num_lacking > 0 and not self._prefetched.can_free(num_lacking):
            return None
        while (blocks := self._pool.allocate(count)) is None:
            if not self._prefetched.evict_last():
                return None
        return blocks

    def reusable_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of blocks that need not be computed if cached: all but those with its last token."""
        if sequence.needs_prompt_logits:
            return []
        num_blocks = (len(sequence.tokens) - 1) // self.limits.block_size
        sequence.naming.reach(sequence.tokens, num_blocks)
        return sequence.naming.names.keys[:num_blocks]

    def is_starved(self, sequence: Sequence) -> bool:
        """Whether it is the first waiting sequence and only lacks blocks."""
        if self.waiting[0] is not sequence or len(self.running) >= self.limits.max_num_seqs:
            return False
        num_blocks = -(-len(sequence.tokens) // self.limits.block_size)
        num_cached = self._pool.match(self.reusable_keys(sequence))
        return num_blocks + len(self.running) - num_cached > self._pool.num_free

    def _plan_mixed(self) -> StepPlan:
        decodes, prefilling, context_tokens = self._plan_decodes()
        beside = StepStats(len(decodes), context_tokens=context_tokens, shared_tokens=self.shared.num_tokens)
        prefills, stats = self._plan_prefills(prefilling, beside, others_decode=bool(decodes))
        return StepPlan(decodes, prefills, stats)

    def _plan_apart(self) -> StepPlan:
        plan = self._plan_prompts()
        if plan.prefills:
            return plan
        decodes, _, context_tokens = self._plan_decodes()
        if decodes:
            stats = StepStats(len(decodes), 0, 0, context_tokens, 0.0, self.shared.num_tokens)
            return StepPlan(decodes, [], stats)
        return self._plan_prompts()  # there were none, or one was preempted: its blocks may admit a prompt

    def _plan_prompts(self) -> StepPlan:
        prefilling = [
            sequence for sequence in self.running if sequence.num_computed < sequence.num_to_prefill
        ]
        others_decode = len(prefilling) < len(self.running)
        prefills, stats = self._plan_prefills(prefilling, StepStats(), others_decode=others_decode)
        return StepPlan([], prefills, stats)

    def _plan_decodes(self) -> tuple[list[Work], list[Sequence], int]:
        """The decodes, each with a block for its token; the prefilling sequences; and the context tokens of
        the decodes.

        A preempted sequence is the last running one that lends nothing, so it was not visited yet or is the
        one that needs the block. The sequences behind that one only lend, and are prefilling.
        """
        decodes: list[Work] = []
        prefilling: list[Sequence] = []
        context_tokens = 0
        block_size = self.limits.block_size
        for sequence in self.running:  # a preemption shortens the list, which ends the loop earlier
            start = sequence.num_computed
            if start < sequence.num_to_prefill:
                prefilling.append(sequence)
                continue
            if start >= len(sequence.blocks) * block_size and not self.grow(sequence):
                prefilling += self.running[len(decodes) + len(prefilling) :]
                break
            if start == sequence.num_to_prefill:
                self.shared.add(sequence)
            decodes.append(Work(sequence, start, 1))
            context_tokens += start + 1
        return decodes, prefilling, context_tokens

    def _plan_prefills(
        self, prefilling: list[Sequence], beside: StepStats, *, others_decode: bool
    ) -> tuple[list[Work], StepStats]:
        """Chunks of prefilling sequences, then of new ones, next to the decodes `beside`; and the stats of
        the step."""
        prefills: list[Work] = []
        stats, pace = beside, self.pace
        budget = self.limits.max_batch_tokens - beside.batch
        limit_s = inf
        if pace is not None:
            limit_s = pace.limit_s(beside, others_decode)
            if pace.most_prompt_tokens is not None:
                budget = min(budget, max(pace.most_prompt_tokens, self.limits.block_size))
        short: list[Sequence] = []
        if pace is not None:
            short = self._pick_short(prefilling, stats, pace.model, limit_s, budget // 2)
        others = (one for one in prefilling if one not in short)
        for sequence in chain(short, others, self._admissions()):
            start = sequence.num_computed
            end = sequence.received_span[0] * self.limits.block_size or sequence.num_to_prefill
            num_left = min(end - start, budget - stats.prefill_tokens)
            if sequence.received_span[0]:
                num_left = min(num_left, shared_prefill_tokens(end - start, self.limits.max_batch_tokens))
            chunk = (
                num_left if pace is None else self._tokens_within(limit_s, pace.model, stats, start, num_left)
            )
            if not chunk:
                if prefills:
                    break
                chunk = min(num_left, self.limits.block_size)
            stats = with_chunk(stats, start, chunk)
            prefills.append(Work(sequence, start, chunk))
            if stats.prefill_tokens == budget or chunk < num_left:
                break
        return prefills, stats

    def _tokens_within(
        self, limit_s: float, model: StepModel, stats: StepStats, start: int, num_left: int
    ) -> int:
        """Tokens after `start` that fit into the step: all, up to a block boundary, or none."""
        if model.step_s(with_chunk(stats, start, num_left)) <= limit_s:
            return num_left
        ends = range(-start % self.limits.block_size, num_left, self.limits.block_size)
        count = bisect_right(ends, limit_s, key=lambda chunk: model.step_s(with_chunk(stats, start, chunk)))
        return ends[count - 1] if count else 0

    def _pick_short(
        self, prefilling: list[Sequence], stats: StepStats, model: StepModel, limit_s: float, most_tokens: int
    ) -> list[Sequence]:
        """Prompts that go before the first one (see the module); admits waiting ones."""
        queue = [*prefilling, *self.waiting[:_MAX_OVERTAKING]]
        if len(queue) < 2:
            return []
        start, num_left = self._prefill_progress(queue[0])
        if model.step_s(with_chunk(stats, start, num_left)) <= limit_s:
            return []
        stats = with_chunk(stats, start, min(num_left, self.limits.block_size))  # always at least one block
        half_s = (model.step_s(stats) + limit_s) / 2
        short: list[Sequence] = []
        for sequence in queue[1:]:
            after = with_chunk(stats, *self._prefill_progress(sequence))
            if (
                sequence.received_span[0]
                or after.prefill_tokens > most_tokens
                or model.step_s(after) > half_s
            ):
                continue
            if sequence.phase is Phase.WAITING and not self._admit_early(sequence):
                continue
            short.append(sequence)
            stats = after
        return short

    def _prefill_progress(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens of a prompt that are computed (or cached, if it waits), and those that are not."""
        if sequence.phase is Phase.RUNNING:
            return sequence.num_computed, sequence.num_to_prefill - sequence.num_computed
        num_cached = self._pool.match(self.reusable_keys(sequence)) * self.limits.block_size
        return num_cached, len(sequence.tokens) - num_cached

    def _admit_early(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence if the first waiting one still fits after it."""
        waiting = [self.waiting[0]] if sequence is self.waiting[0] else [self.waiting[0], sequence]
        num_running = len(self.running) + len(waiting)
        num_blocks = sum(-(-len(one.tokens) // self.limits.block_size) for one in waiting)
        if num_running > self.limits.max_num_seqs or num_blocks + num_running > self._pool.num_free:
            return False
        return self._admit(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_sealed = sequence.num_to_prefill = 0
        sequence.received_span = (0, 0)
        sequence.phase = Phase.WAITING
        self.enqueue(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _admissions(self) -> Iterator[Sequence]:
        """Admit waiting sequences one by one while there is capacity and the caller iterates."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                return
            yield sequence

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to the running ones if there are blocks for it."""
        if not self._find_blocks(sequence):
            return False
        self.remove(sequence)
        self._prefetched.release(sequence.request.request_id)
        insort(self.running, sequence, key=_order)
        sequence.phase = Phase.RUNNING
        self._age_priorities(sequence.order[0])
        return True

    def _age_priorities(self, admitted: int) -> None:
        """Count an admission, and promote the oldest waiting sequence of lower priority if it is its turn."""
        if admitted == PROMOTED or not self.waiting or self.waiting[-1].order[0] <= admitted:
            return
        self._num_before_lower += 1
        if self._num_before_lower < PROMOTED_ONE_IN - 1:
            return
        self._num_before_lower = 0
        num_not_lower = bisect_right(self.waiting, admitted, key=lambda waiting: waiting.order[0])
        oldest = min(self.waiting[num_not_lower:], key=lambda waiting: waiting.order[2])
        self.remove(oldest)
        oldest.promote()
        self.enqueue(oldest)
        self._prefetched.move_queued(oldest.request.request_id, oldest.order)

    def _find_blocks(self, sequence: Sequence) -> bool:
        """Assign cached and new blocks for all tokens of the first waiting sequence, or none."""
        block_size = self.limits.block_size
        length = len(sequence.tokens)
        num_blocks = -(-length // block_size)
        request_id = sequence.request.request_id
        keys = self.reusable_keys(sequence)
        num_missing = num_blocks + len(self.running) - self._pool.match(keys)
        num_lacking = num_missing - self._pool.num_free
        if num_lacking > 0 and not self._prefetched.can_free(num_lacking, spare=request_id):
            return False  # the usual case at the head of a long queue; changes nothing
        while (
            num_missing > self._pool.num_free or (acquired := self._acquire_blocks(keys, num_blocks)) is None
        ):
            if not self._prefetched.evict_last(spare=request_id):
                return False
        cached, allocated = acquired
        sequence.blocks = cached + allocated
        sequence.num_computed = len(cached) * block_size
        sequence.num_sealed = len(cached)
        sequence.num_to_prefill = length
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _acquire_blocks(
        self, keys: list[BlockKey], num_blocks: int
    ) -> tuple[list[BlockId], list[BlockId]] | None:
        """Cached blocks and new ones for the rest; None if that would leave less than one block per running
        sequence, because some cached blocks may have counted as free."""
        cached = self._pool.acquire(keys)
        num_missing = num_blocks - len(cached)
        allocated = None
        if num_missing + len(self.running) <= self._pool.num_free:
            allocated = self._pool.allocate(num_missing)
        if allocated is None:
            self._pool.release(reversed(cached))
            return None
        return cached, allocated
